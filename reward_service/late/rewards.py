"""Late rewards on their way through a process that scores: a function's promise becomes a ticket, and later a reward.

Invariants: a function that has promised a reward for an item is not called for it again, also after a restart. An item
whose reward has not come is `pending`, which is no failure and no score. It ends as `late` after its time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

from rollmesh.mesh.config.scorers.late import LateSection
from rollmesh.protos import reward_pb2
from rollmesh.reward_service.late.store import LateStore, LateStoreError, Waiting
from rollmesh.reward_service.outcomes import PENDING, Failed, Outcome, Scored, Unscorable, later

OnOutcome = Callable[[int, Outcome], None]
_NO_STORE = "the function promises a reward for later, and reward.late.store is not set"


class LateRewards:
    """Looks for rewards that were promised.

    Args:
        section: of the configuration.

    Raises:
        LateStoreError: the store cannot be opened.
    """

    def __init__(self, section: LateSection) -> None:
        self._section = section
        self._store = None if section.store is None else LateStore(section.store.expanduser())

    def without_known(
        self, function: str, items: Sequence[reward_pb2.ScoreItem], indices: Sequence[int], on_outcome: OnOutcome
    ) -> Sequence[int]:
        """Gives the outcomes of items that a function has promised before; returns the others.

        Args:
            function: its name.
            items: of the call.
            indices: of those that the function is to score.
            on_outcome: gets an item's index and outcome.
        """
        if self._store is None:
            return indices
        keys = {_key(function, items[index]): index for index in indices}
        try:
            found = self._store.waiting(keys)
        except LateStoreError as error:
            # To call the function again might begin its work twice.
            for index in indices:
                on_outcome(index, _failed(error))
            return ()
        for key, waiting in found.items():
            on_outcome(keys.pop(key), self._outcome(waiting))
        return list(keys.values())

    def receiver(self, function: str, items: Sequence[reward_pb2.ScoreItem], on_outcome: OnOutcome) -> OnOutcome:
        """A receiver of a function's outcomes that notes its promises; see `without_known`."""

        def receive(index: int, outcome: Outcome) -> None:
            if isinstance(outcome, Failed) and outcome.code == PENDING:
                outcome = self._promised(_key(function, items[index]), outcome)
            on_outcome(index, outcome)

        return receive

    def close(self) -> None:
        """Closes the store."""
        if self._store is not None:
            self._store.close()

    def _promised(self, key: str, promise: Failed) -> Outcome:
        if self._store is None:
            return Failed("late_store", _NO_STORE)
        try:
            return self._outcome(self._store.add(key, promise.message))
        except LateStoreError as error:
            return _failed(error)

    def _outcome(self, waiting: Waiting) -> Outcome:
        delivery = waiting.delivery
        if delivery is None:
            if time.time() - waiting.since >= self._section.timeout_s:
                return Failed("late", f"nothing was delivered for {waiting.ticket} in {self._section.timeout_s:g} s")
            return later(waiting.ticket, self._section.ask_s)
        if delivery.total is None:
            return Unscorable(delivery.reason or "unscorable")
        return Scored(delivery.total, delivery.components)


def _key(function: str, item: reward_pb2.ScoreItem) -> str:
    """Equal for each try of an item; another attempt at its group is another item."""
    return json.dumps([function, item.run, item.trajectory_id or item.item_id, item.attempt])


def _failed(error: LateStoreError) -> Failed:
    return Failed(error.code, str(error), retryable=True)
