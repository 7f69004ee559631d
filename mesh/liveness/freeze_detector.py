"""Decides whether a process that does not answer is frozen or only busy, from timed observations. Pure.

Invariants:
- silence alone is no verdict. A silent process is frozen when it is stopped, when it runs, or when it sleeps, each for
  longer than its bound. Any answer ends the silence, and all of its counts;
- a process that waits for a processor is counted nothing: on a machine that is overloaded it gets its time later;
- the clock of the watcher is not trusted: between two readings at most `Bounds.poll_s` counts. A watcher that was late
  itself (overload, a stopped terminal, a suspended machine) has not heard the answers of that time either;
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


class ThreadState(enum.Enum):
    """The state of the threads of a process."""

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

    state: ThreadState
    cpu_s: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of a silent process, in seconds; beyond one of them it is frozen.

    Attributes:
        stopped_s: be stopped.
        running_s: receive of processor time, on its busiest thread.
        asleep_s: sleep.
        leaving_s: live after it has closed its port; be gone without an end of its service.
        poll_s: pause between two readings; the most that counts for one.
    """

    stopped_s: float
    running_s: float
    asleep_s: float
    leaving_s: float
    poll_s: float

    @classmethod
    def of(cls, frozen_after_s: float, leaving_s: float = math.inf) -> Bounds:
        """All bounds from one; 0: silence is never a failure."""
        after_s = frozen_after_s or math.inf
        return cls(
            stopped_s=after_s,
            running_s=after_s,
            asleep_s=_ASLEEP_FACTOR * after_s,
            leaving_s=leaving_s if frozen_after_s else math.inf,
            poll_s=min(1.0, after_s / 4),
        )


class FreezeKind(enum.Enum):
    """The kind of a freeze."""

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

    kind: FreezeKind
    seconds: float
    silent_s: float

    def __str__(self) -> str:
        return {
            FreezeKind.STOPPED: f"stopped by a signal for {self.seconds:.0f} s",
            FreezeKind.RUNNING: f"ran for {self.seconds:.0f} s of processor time and answered nothing in "
            f"{self.silent_s:.0f} s: something holds it",
            FreezeKind.ASLEEP: f"asleep, and answered nothing in {self.silent_s:.0f} s",
            FreezeKind.LEAVING: f"closed its port {self.seconds:.0f} s ago and does not end",
            FreezeKind.GONE: f"has ended {self.seconds:.0f} s ago, and its service has not",
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
        self._counts = dict.fromkeys(FreezeKind, 0.0)

    def observe_answer(self) -> None:
        """Ends the silence: the process has answered, however late."""
        self._began = self._last = None
        self._counts = dict.fromkeys(FreezeKind, 0.0)

    def observe_silence(self, now: float, process: ProcessState, *, port_closed: bool = False) -> Frozen | None:
        """Counts silence: the process has not answered since the last call.

        Args:
            now: any clock that does not go back, in seconds.
            process: its present state.
            port_closed: no one listens at its address any more: it is on its way out.

        Returns:
            The verdict, once there is one.
        """
        if process.state is ThreadState.TRACED:
            self.observe_answer()
            return None
        if self._last is not None:
            self._count(*self._last, now, process, port_closed=port_closed)
        began = self._began = now if self._began is None else self._began
        self._last = (now, process)
        bounds = self._bounds
        for kind, bound in (
            (FreezeKind.STOPPED, bounds.stopped_s),
            (FreezeKind.RUNNING, bounds.running_s),
            (FreezeKind.ASLEEP, bounds.asleep_s),
            (FreezeKind.LEAVING, bounds.leaving_s),
            (FreezeKind.GONE, bounds.leaving_s),
        ):
            if self._counts[kind] >= bound:
                return Frozen(kind, self._counts[kind], now - began)
        return None

    def _count(
        self, then: float, before: ProcessState, now: float, process: ProcessState, *, port_closed: bool
    ) -> None:
        counts = self._counts
        passed = min(max(0.0, now - then), self._bounds.poll_s)
        both = {before.state, process.state}
        counts[FreezeKind.STOPPED] = counts[FreezeKind.STOPPED] + passed if both == {ThreadState.STOPPED} else 0.0
        if process.state is ThreadState.GONE:
            counts[FreezeKind.GONE] += passed
            return
        if port_closed:
            counts[FreezeKind.LEAVING] += passed
            return
        received = min(_busiest(before, process), passed)
        counts[FreezeKind.RUNNING] += received
        if both == {ThreadState.ASLEEP} and received < _IDLE_SHARE * passed:
            counts[FreezeKind.ASLEEP] += passed


def _busiest(before: ProcessState, process: ProcessState) -> float:
    """The most processor time that one thread has received between two readings; threads that are new count in full."""
    return max((cpu - before.cpu_s.get(thread, 0.0) for thread, cpu in process.cpu_s.items()), default=0.0)
