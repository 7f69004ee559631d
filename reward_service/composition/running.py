"""Calls the parts of a composition for items: each function when its gates are known, again where an error may pass.

Invariants
  * Each item has one outcome, as soon as its last part has one.
  * A function behind a gate is called as soon as the gate of a group's last member is known. It is called once, for all
    members whose gate is open.
  * An error takes effect by `on_error` when no more tries are left, or no more can begin in the item's time. An item
    that has only not been begun is none, and neither is one whose reward comes later.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from rollmesh.reward_service.call_times import CallTimes
from rollmesh.reward_service.composition.plan import SHUT, Composition, PartOutcome
from rollmesh.reward_service.outcomes import NOT_BEGUN, PENDING, Failed, Outcome

OnOutcome = Callable[[int, Outcome], None]
"""Receives an item's index, and its outcome; called on the event loop."""
Apply = Callable[[int, Sequence[int], CallTimes, OnOutcome], Awaitable[None]]
"""Calls the function of a part, by its place, for items, by their indices; all outcomes come before it returns."""

_PAUSE_S = 0.1


async def run_parts(
    composition: Composition,
    groups: Sequence[Sequence[int]],
    apply: Apply,
    times: CallTimes,
    *,
    attempts: int,
    on_outcome: OnOutcome,
) -> None:
    """Runs all parts for items.

    Args:
        composition: of the items' source.
        groups: indices of the items, by group.
        apply: calls functions.
        times: of the call, `within` a time for as many calls of a function as the composition has stages.
        attempts: tries of a part whose error does not fail the item.
        on_outcome: gets each item's outcome; all of them before this returns.
    """
    indices = [index for group in groups for index in group]
    if not composition.parts:
        for index in indices:
            on_outcome(index, composition.compose(()))
        return
    if len(composition.parts) == 1 and composition.parts[0].on_error == "fail":  # the common case, and on the hot path
        await apply(0, indices, times, lambda index, outcome: on_outcome(index, composition.compose((outcome,))))
        return
    run = _Run(composition, groups, apply, times, attempts, on_outcome)
    async with asyncio.TaskGroup() as run.tasks:
        for place, gate in enumerate(composition.gates):
            if gate is None:
                run.call(place, indices)


class _Run:
    """The state of one `run_parts`."""

    tasks: asyncio.TaskGroup

    def __init__(
        self,
        composition: Composition,
        groups: Sequence[Sequence[int]],
        apply: Apply,
        times: CallTimes,
        attempts: int,
        on_outcome: OnOutcome,
    ) -> None:
        self._composition = composition
        self._apply = apply
        self._attempts = attempts
        self._on_outcome = on_outcome
        self._times = [times.stage(depth, composition.stages) for depth in composition.depths]
        self._group = {index: group for group in groups for index in group}
        self._known: dict[int, dict[int, PartOutcome]] = {index: {} for index in self._group}
        self._followers = [
            [place for place, gate in enumerate(composition.gates) if gate is not None and gate[0] == before]
            for before in range(len(composition.parts))
        ]
        # Items that are to be tried again, by part, first of the group and number of the try.
        self._again: dict[tuple[int, int, int], list[int]] = {}
        self._failures: dict[tuple[int, int], Failed] = {}

    def call(self, place: int, indices: Sequence[int], attempt: int = 1) -> None:
        """Calls the function of a part in a task."""
        accept = partial(self._accept, place, attempt)
        self.tasks.create_task(self._call(place, indices, accept))

    async def _call(self, place: int, indices: Sequence[int], accept: OnOutcome) -> None:
        await self._apply(place, indices, self._times[place], accept)

    def _accept(self, place: int, attempt: int, index: int, outcome: Outcome) -> None:
        """Takes the outcome of one try."""
        failed = outcome if isinstance(outcome, Failed) else None
        if failed is None or failed.code == PENDING or self._composition.parts[place].on_error == "fail":
            self._settle(place, index, outcome)
        elif failed.code == NOT_BEGUN:
            # There was no room for another try: what the last one has said holds.
            self._settle(place, index, self._failures.get((place, index), outcome))
        elif not (failed.retryable and self._try_again(place, attempt, index, failed.retry_after_s)):
            self._settle(place, index, outcome)
        else:
            self._failures[place, index] = failed

    def _try_again(self, place: int, attempt: int, index: int, retry_after_s: float) -> bool:
        """Tries an item again after a pause, with those of its group that fail meanwhile; False if it is too late."""
        pause_s = max(_PAUSE_S * 2 ** (attempt - 1), retry_after_s)
        if attempt >= self._attempts or time.monotonic() + pause_s >= self._times[place].begin_by:
            return False
        key = (place, self._group[index][0], attempt)
        if key in self._again:
            self._again[key].append(index)
        else:
            self._again[key] = [index]
            self.tasks.create_task(self._call_later(key, pause_s))
        return True

    async def _call_later(self, key: tuple[int, int, int], pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        place, _, attempt = key
        self.call(place, self._again.pop(key), attempt + 1)

    def _settle(self, place: int, index: int, outcome: PartOutcome) -> None:
        """Keeps the last outcome of a part, and begins what has waited for it."""
        known = self._known[index]
        known[place] = outcome
        if len(known) == len(self._composition.parts):
            in_order = [known[each] for each in range(len(known))]
            self._on_outcome(index, self._composition.compose(in_order))
        for follower in self._followers[place]:
            group = self._group[index]
            if all(place in self._known[member] for member in group):
                self._pass_gate(follower, place, group)

    def _pass_gate(self, follower: int, place: int, group: Sequence[int]) -> None:
        opened = [index for index in group if self._composition.opens(follower, self._known[index][place])]
        if opened:
            self.call(follower, opened)
        for index in group:
            if index not in opened:
                self._settle(follower, index, SHUT)
