"""Decides whether a process that does not answer is frozen or only busy, from timed observations. Pure.

Invariants:
- silence alone is no verdict. A process is frozen when it is stopped, when it runs and does not answer, or when it
  sleeps and does not answer, each for longer than its bound; any answer ends the silence, and all of its counts;
- a process that waits for a processor is counted nothing: on a machine that is overloaded it gets its time later;
- the clock of the watcher is not trusted: between two looks at most `Bounds.look_s` counts, since a watcher that was
  late itself (overload, a stopped terminal, a suspended machine) has not heard the answers of that time either;
- a process under a debugger is never frozen.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass

# A thread that gets less than this share of a processor sleeps: timers and polls continue in a process that hangs.
_IDLE_SHARE = 0.1
# The others are this often the bound of a stopped process: sleepers may wait for a disk.
_ASLEEP_FACTOR = 3.0


class State(enum.Enum):
    """What the threads of a process do."""

    STOPPED = "stopped"
    TRACED = "traced"
    RUNNABLE = "runnable"
    ASLEEP = "asleep"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A process at one moment.

    Attributes:
        state: RUNNABLE where any of its threads runs or waits for a processor.
        cpu_s: seconds of processor time that each of its threads has received so far, by thread id.
    """

    state: State
    cpu_s: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a silent process may do before it is frozen, in seconds.

    Attributes:
        stopped_s: be stopped.
        running_s: receive of processor time, on its busiest thread.
        asleep_s: sleep.
        leaving_s: live after it has closed its port; be gone without an end of its service.
        look_s: pause between two looks; the most that counts for one.
    """

    stopped_s: float
    running_s: float
    asleep_s: float
    leaving_s: float
    look_s: float

    @classmethod
    def of(cls, frozen_after_s: float, leaving_s: float = math.inf) -> Bounds:
        """All bounds from one; 0: silence is never a failure."""
        after_s = frozen_after_s or math.inf
        return cls(
            stopped_s=after_s,
            running_s=after_s,
            asleep_s=_ASLEEP_FACTOR * after_s,
            leaving_s=leaving_s if frozen_after_s else math.inf,
            look_s=min(1.0, after_s / 4),
        )


class Kind(enum.Enum):
    """How a process is frozen."""

    STOPPED = "stopped"
    RUNNING = "running"
    ASLEEP = "asleep"
    LEAVING = "leaving"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Frozen:
    """The verdict.

    Attributes:
        kind: which bound was passed.
        seconds: of what that bound counts.
        silent_s: of the whole silence.
    """

    kind: Kind
    seconds: float
    silent_s: float

    def __str__(self) -> str:
        return {
            Kind.STOPPED: f"stopped by a signal for {self.seconds:.0f} s",
            Kind.RUNNING: f"ran for {self.seconds:.0f} s of processor time and answered nothing in {self.silent_s:.0f} "
            "s: something holds it",
            Kind.ASLEEP: f"asleep, and answered nothing in {self.silent_s:.0f} s",
            Kind.LEAVING: f"closed its port {self.seconds:.0f} s ago and does not end",
            Kind.GONE: f"has ended {self.seconds:.0f} s ago, and its service has not",
        }[self.kind]


class FreezeDetector:
    """Judges one process.

    Args:
        bounds: of its silence.
    """

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._began: float | None = None
        self._last: tuple[float, ProcessState] | None = None
        self._counts = dict.fromkeys(Kind, 0.0)

    def answered(self) -> None:
        """It has answered, however late."""
        self._began = self._last = None
        self._counts = dict.fromkeys(Kind, 0.0)

    def silent(self, now: float, sight: ProcessState, *, port_closed: bool = False) -> Frozen | None:
        """It has not answered since the last look.

        Args:
            now: any clock that does not go back, in seconds.
            sight: the process now.
            port_closed: no one listens at its address any more: it is on its way out.

        Returns:
            The verdict, once there is one.
        """
        if sight.state is State.TRACED:
            self.answered()
            return None
        if self._last is not None:
            self._count(*self._last, now, sight, port_closed=port_closed)
        began = self._began = now if self._began is None else self._began
        self._last = (now, sight)
        bounds = self._bounds
        for kind, bound in (
            (Kind.STOPPED, bounds.stopped_s),
            (Kind.RUNNING, bounds.running_s),
            (Kind.ASLEEP, bounds.asleep_s),
            (Kind.LEAVING, bounds.leaving_s),
            (Kind.GONE, bounds.leaving_s),
        ):
            if self._counts[kind] >= bound:
                return Frozen(kind, self._counts[kind], now - began)
        return None

    def _count(self, then: float, before: ProcessState, now: float, sight: ProcessState, *, port_closed: bool) -> None:
        counts = self._counts
        passed = min(max(0.0, now - then), self._bounds.look_s)
        both = {before.state, sight.state}
        counts[Kind.STOPPED] = counts[Kind.STOPPED] + passed if both == {State.STOPPED} else 0.0
        if sight.state is State.GONE:
            counts[Kind.GONE] += passed
            return
        if port_closed:
            counts[Kind.LEAVING] += passed
            return
        received = min(_busiest(before, sight), passed)
        counts[Kind.RUNNING] += received
        if both == {State.ASLEEP} and received < _IDLE_SHARE * passed:
            counts[Kind.ASLEEP] += passed


def _busiest(before: ProcessState, sight: ProcessState) -> float:
    """The most processor time that one thread has received between two looks; threads that are new count in full."""
    return max((cpu - before.cpu_s.get(thread, 0.0) for thread, cpu in sight.cpu_s.items()), default=0.0)
