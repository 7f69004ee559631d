"""Checks that the mesh continues after a fault, and finds what helps where it does not.

The promise: whatever froze, died, lost a reply or came back late, the next step is trained within the fault plus
`GRACE_S`. A fault lasts until it is undone and every service answers again: a process has to start. One step may still
come from what was gathered before. With a bound of S versions a batch may pass by a group that no one finishes S times.
So S + 2 steps have to follow, each within `GRACE_S` of the one before. A generator says that it answers before it has
loaded its model, and stores something within the time in which services start.

A stall is recorded with what there was to do and what the buffer said it waits for. It is watched for a while, whether
it ends by itself. Then the learner is killed, then the generators, then everything. So the run can continue, and the
record says which process was stuck.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollmesh.mesh.errors import RollmeshError
from tests.faults.audit import who_waits
from tests.faults.moments import Moments
from tests.faults.observe import StepWatch, WriteRecord
from tests.faults.processes import FaultError
from tests.faults.world import FRONTS, GENERATORS, LEARNER, REDIS, REWARDS, START_S, World

GRACE_S = 30.0
# Longer than this, a stall does not end by itself.
_WATCHED_S = 20.0
_REMEDIES = {
    "itself": (),
    "killing the learner": (LEARNER,),
    "killing the generators": GENERATORS,
    "killing everything": (*GENERATORS, LEARNER, *REWARDS, *FRONTS, REDIS),
}


@dataclass(frozen=True, slots=True)
class Stall:
    """One time that the mesh stood still for too long.

    Attributes:
        kinds: of the faults that were on the mesh last.
        what: that did not happen.
        at_s: seconds since the run began, when the grace was over.
        lasted_s: from the end of the fault, or the last step, until it happened.
        work: groups by state and tasks that waited.
        evaluation: the same of the evaluation.
        waits: who holds what since when, as the mesh says it.
        ended_by: what helped.
    """

    kinds: list[str]
    what: str
    at_s: float
    lasted_s: float
    work: dict[str, int]
    evaluation: dict[str, int]
    waits: str
    ended_by: str


class Progress:
    """Sees to it that the mesh continues.

    Args:
        world, steps, writes, moments: of the run.
        tell: takes progress lines.

    Attributes:
        stalls: found so far.
    """

    def __init__(
        self, world: World, steps: StepWatch, writes: WriteRecord, moments: Moments, tell: Callable[[str], None]
    ) -> None:
        self._world = world
        self._steps = steps
        self._writes = writes
        self._moments = moments
        self._tell = tell
        self._began = time.monotonic()
        self.stalls: list[Stall] = []

    def restored(self, kinds: Sequence[str], end: float) -> float:
        """Waits until the mesh continues after faults, whatever it needs.

        Args:
            kinds: of the faults.
            end: when the last was over (monotonic).

        Returns:
            When every service answered and every generator had stored something.

        Raises:
            FaultError: nothing helps.
        """
        last = answers = self._answers(kinds, end)
        for nth in range(1, self._world.settings.staleness + 3):
            since = last if nth > 1 else end
            last = max(last, self._within(kinds, "no step", since, last + GRACE_S, self._step(end, nth)))
        stored = [
            self._within(kinds, f"{name} stores nothing", end, last + START_S, self._stores(name, end))
            for name in GENERATORS
        ]
        return max(answers, *stored)

    def _answers(self, kinds: Sequence[str], end: float) -> float:
        """Until every service answers that was killed."""
        last = end
        for name in (REDIS, *FRONTS, *REWARDS, LEARNER, *GENERATORS):
            if self._restarted(name, end):
                ready = self._ready(name)
                last = max(last, self._within(kinds, f"{name} does not answer", end, end + START_S, ready))
        return last

    def _restarted(self, name: str, end: float) -> bool:
        """True where a service is away, or was started during or after the round."""
        process = self._world.supervisor.current(name)
        return process is None or process.began > end - START_S

    def _step(self, since: float, nth: int) -> Callable[[float], float]:
        return lambda until: self._steps.wait_step(since, until, nth=nth).seen

    def _ready(self, name: str) -> Callable[[float], float]:
        return lambda until: self._world.supervisor.wait_ready(name, max(0.0, until - time.monotonic()))

    def _stores(self, name: str, since: float) -> Callable[[float], float]:
        return lambda until: self._writes.wait_write(name, since, until)

    def _within(
        self, kinds: Sequence[str], what: str, since: float, until: float, wait: Callable[[float], float]
    ) -> float:
        """The time at which something happened; where it does not happen in time, a stall."""
        try:
            return wait(until)
        except FaultError:
            return self._stalled(kinds, what, since, wait)

    def _stalled(self, kinds: Sequence[str], what: str, since: float, wait: Callable[[float], float]) -> float:
        at, work, evaluation, waits = time.monotonic(), *self._counts(), self._waits()
        self._tell(f"STALL: {what} for {at - since:.0f} s after {' + '.join(kinds)}: {work}; {waits}")
        happened, remedy = self._remedied(wait)
        self.stalls.append(
            Stall(
                list(kinds),
                what,
                round(at - self._began, 1),
                round(happened - since, 1),
                work,
                evaluation,
                waits,
                remedy,
            )
        )
        self._tell(f"STALL ended by {remedy} after {happened - since:.0f} s")
        if remedy == "nothing":
            raise FaultError(f"{what} after {' + '.join(kinds)}, and nothing helps: {json.dumps(work)}; {waits}")
        return happened

    def _remedied(self, wait: Callable[[float], float]) -> tuple[float, str]:
        """When it happened after all, and what helped."""
        for remedy, killed in _REMEDIES.items():
            for name in killed:
                self._world.supervisor.kill9(name)
            try:
                return wait(time.monotonic() + (START_S if killed else _WATCHED_S)), remedy
            except FaultError:
                continue
        return time.monotonic(), "nothing"

    def _counts(self) -> tuple[dict[str, int], dict[str, int]]:
        return self._moments.counts(), self._moments.counts("eval")

    def _waits(self) -> str:
        try:
            return who_waits(self._world.fronts[0])
        except RollmeshError as error:
            return f"the buffer does not answer: {error}"
