"""One call to an endpoint: which of its items still wait, and what becomes of each when its result comes.

Invariants
  * A result counts once, for an item of this call; what else comes is remembered by its id.
  * An item is resolved, or goes back to the queue, or is still open when the call ends.
  * Where a server needs whole groups, a group's items are resolved together, or all go back: its scores may depend on
    the others'.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rollmesh.protos import reward_pb2
from rollmesh.reward_service.client.tickets import Entry
from rollmesh.reward_service.client.validation import contract_fault
from rollmesh.reward_service.outcomes import error_result, is_not_begun, is_pending


class Call:
    """A call in progress.

    Args:
        address: of the endpoint, for errors.
        entries: the items of the call.
        attempts: tries that an item with a retryable error gets.
        needs_group: the server needs a group's items together.

    Attributes:
        answered: number of items with a result that stands.
        unanswered: number of items for which no result has come.
        strange: item_ids of results that belong to no open item of this call.
        refused: the server could not begin all items.
        timer: takes items back.
    """

    def __init__(self, address: str, entries: Sequence[Entry], attempts: int, *, needs_group: bool) -> None:
        self.answered = 0
        self.refused = False
        self.timer: asyncio.TimerHandle | None = None
        self.strange: list[str] = []
        self._address = address
        self._attempts = attempts
        self._open = {entry.item.item_id: entry for entry in entries}
        self.unanswered = len(entries)
        self._units: dict[tuple[int, str], list[Entry]] = {}
        if needs_group:
            for entry in entries:
                self._units.setdefault(entry.unit, []).append(entry)
        self._held: dict[tuple[int, str], list[tuple[Entry, reward_pb2.ScoreResult]]] = {}
        self._waiting: list[Entry] = []
        self._again: list[Entry] = []

    @property
    def done(self) -> bool:
        """True once each item has a result."""
        return not self._open

    def accept(self, result: reward_pb2.ScoreResult, now: float) -> bool:
        """Takes a result; False where it belongs to no open item."""
        entry = self._open.pop(result.item_id, None)
        if entry is None:
            self.strange.append(result.item_id)
            return False
        self.unanswered -= 1
        self._take(entry, result, now)
        return True

    def miss(self, now: float) -> None:
        """Takes what the answer lacks, at its end, as errors of these items."""
        missing, self._open = self._open, {}
        for item_id, entry in missing.items():
            message = "the answer has no result for it"
            self._take(entry, error_result(item_id, "missing_result", message, retryable=True), now)

    def left(self) -> list[Entry]:
        """Removes and returns the items without a result that stands: after a call that has failed."""
        held = [entry for group in self._held.values() for entry, _ in group]
        left = [*held, *self._open.values()]
        self._open, self._held = {}, {}
        return left

    def take_back(self) -> tuple[list[Entry], list[Entry]]:
        """Removes and returns the items that the server could not begin, and those to be tried again."""
        back = self._waiting, self._again
        self._waiting, self._again = [], []
        return back

    @property
    def returns(self) -> bool:
        """True if items are to be taken back."""
        return bool(self._waiting or self._again)

    def _take(self, entry: Entry, result: reward_pb2.ScoreResult, now: float) -> None:
        if (fault := contract_fault(entry.item, result)) is not None:
            result = error_result(entry.item.item_id, *fault, retryable=False)
        unit = self._units.get(entry.unit)
        if unit is None:
            self._decide([(entry, result)], now)
            return
        held = self._held.setdefault(entry.unit, [])
        held.append((entry, result))
        if len(held) == len(unit):
            self._decide(self._held.pop(entry.unit), now)

    def _decide(self, unit: Sequence[tuple[Entry, reward_pb2.ScoreResult]], now: float) -> None:
        if any(is_not_begun(result) for _, result in unit):
            for entry, _ in unit:
                entry.first_failed_at = None
                self._waiting.append(entry)
            return
        again = False
        for entry, result in unit:
            if is_pending(result):
                continue
            entry.attempts += 1
            if result.WhichOneof("outcome") == "error":
                error = result.error
                message = f"{self._address}: {error.message}"
                entry.record_failure(error.code, message, retryable=error.retryable, address=self._address, now=now)
                entry.retry_after_s = error.retry_after_ms / 1000
                again |= error.retryable and entry.attempts < self._attempts
        for entry, result in unit:
            if again:
                self._again.append(entry)
            elif result.WhichOneof("outcome") == "error" and not is_pending(result):
                self.answered += 1
                entry.fail()
            else:
                self.answered += 1
                entry.resolve(result)
