"""The swap of shared devices between generators and learner, as a state machine without I/O.

```
generating -> freezing -> releasing -> onloading -> training -> offloading -> waking -> loading -> verifying
     ^                                                                                                 |
     +------------------------------------------- resuming <-------------------------------------------+
```

Each phase but `generating` and `training` is a step with a deadline. Its outcome is told by `advance` or `fail`.

- A step towards training that fails is taken back: the generators wake, and the next attempt has to wait.
- A learner that cannot give its memory back keeps it and ends: the next one finds the devices free.
- Generators that cannot wake are asked again from `waking` on, with the weights in full.
- After `attempts` failures in a row the run ends, and says why.

After an error the phase is that of the side that has the devices, as far as any has: a checkpoint may still be written.

Invariant: at most one side has its memory, but for `onloading` and `offloading`, in which nothing else happens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from rollmesh.mesh.errors import MemoryHeldError, SwapError


class Phase(StrEnum):
    """The phases of shared devices."""

    GENERATING = "generating"
    FREEZING = "freezing"
    RELEASING = "releasing"
    ONLOADING = "onloading"
    TRAINING = "training"
    OFFLOADING = "offloading"
    WAKING = "waking"
    LOADING = "loading"
    VERIFYING = "verifying"
    RESUMING = "resuming"


TO_TRAINING = (Phase.FREEZING, Phase.RELEASING, Phase.ONLOADING)
TO_GENERATING = (Phase.OFFLOADING, Phase.WAKING, Phase.LOADING, Phase.VERIFYING, Phase.RESUMING)
_ORDER = (*TO_TRAINING, Phase.TRAINING, *TO_GENERATING, Phase.GENERATING)
_NEXT = dict(zip(_ORDER, (*_ORDER[1:], Phase.FREEZING), strict=True))
# The first step of the way back to `generating`, by the step that failed: nothing was brought back before `onloading`.
_WAY_BACK = {Phase.FREEZING: Phase.WAKING, Phase.RELEASING: Phase.WAKING, Phase.ONLOADING: Phase.OFFLOADING}
# The time before this turn is that of the start.
_FIRST_COUNTED = 2


@dataclass(frozen=True, slots=True)
class SwapRules:
    """Bounds of swaps.

    Attributes:
        step_s: deadline of each step, in seconds.
        attempts: failures in a row, in one direction, after which the run ends.
        pause_s: seconds before the next attempt after a swap that was taken back; they double each time.
    """

    step_s: float
    attempts: int = 3
    pause_s: float = 2.0


class SwapMachine:
    """The phase of shared devices, and what follows it.

    Args:
        rules: see there.
        clock: monotonic seconds.

    Attributes:
        phase: the present one. A learner starts with the devices, in `training`.
        turns: turns that the learner has had, the first included.
        taken_back: swaps that were taken back.
        seconds: of every phase since the second turn began; engines start, and models are loaded, before it.
        last: seconds of the steps of the last swap in each direction.
    """

    def __init__(self, rules: SwapRules, clock: Callable[[], float]) -> None:
        self._rules = rules
        self._clock = clock
        self._began = self._since = clock()
        self._failures: list[str] = []
        self._wake_failures: list[str] = []
        self._returning = False
        self._not_before = self._began
        self.phase = Phase.TRAINING
        self.turns = 1
        self.taken_back = 0
        self.seconds: dict[Phase, float] = dict.fromkeys(Phase, 0.0)
        self.last: dict[Phase, float] = {}

    @property
    def in_swap(self) -> bool:
        """A step is due."""
        return self.phase not in (Phase.GENERATING, Phase.TRAINING)

    @property
    def lasted_s(self) -> float:
        """Seconds of the present phase so far."""
        return self._clock() - self._since

    @property
    def left_s(self) -> float:
        """Seconds until the deadline of the present step."""
        return max(0.0, self._rules.step_s - self.lasted_s)

    @property
    def step_s(self) -> float:
        """Deadline of each step, in seconds."""
        return self._rules.step_s

    @property
    def pause_s(self) -> float:
        """Seconds before the next attempt, because the last one has failed or was taken back."""
        return max(0.0, self._not_before - self._clock())

    @property
    def swap_share(self) -> float:
        """Share of the time since the second turn began that swaps took, 0 to 1; 0 before."""
        if self.turns < _FIRST_COUNTED:
            return 0.0
        swaps = sum(self.seconds[phase] for phase in (*TO_TRAINING, *TO_GENERATING))
        swaps += self.lasted_s if self.in_swap else 0.0
        return swaps / max(self._clock() - self._began, 1e-9)

    def begin_turn(self) -> None:
        """Begins to take the devices from the generators."""
        self._expect(Phase.GENERATING)
        self._enter(Phase.FREEZING)

    def end_turn(self) -> None:
        """Begins to give the devices to the generators."""
        self._expect(Phase.TRAINING)
        self._enter(Phase.OFFLOADING)

    def advance(self) -> None:
        """Records that the present step is done.

        Raises:
            SwapError: the generators are back, and it was the last attempt to take the devices.
        """
        if not self.in_swap:
            raise RuntimeError(f"{self.phase} has no step that ends")
        self._enter(_NEXT[self.phase])
        if self.phase is Phase.TRAINING:
            self.turns += 1
            self._failures = []
            if self.turns == _FIRST_COUNTED:
                self._began, self.seconds = self._since, dict.fromkeys(Phase, 0.0)
        elif self.phase is Phase.GENERATING:
            self._wake_failures = []
            if self._returning:
                self._return()

    def fail(self, why: str) -> None:
        """Records that the present step has failed, its deadline included.

        Args:
            why: in words, with the names of those that failed.

        Raises:
            MemoryHeldError: there is no way back.
            SwapError: it was the last attempt.
        """
        if self.phase in _WAY_BACK:
            self._failures.append(f"{self.phase}: {why}")
            self._returning = True
            self._enter(_WAY_BACK[self.phase])
            return
        if self.phase is Phase.OFFLOADING:
            self._enter(Phase.TRAINING)
            raise MemoryHeldError(f"the learner could not give its memory back: {why}", hint="see its log")
        if not self.in_swap:
            raise RuntimeError(f"{self.phase} has no step that fails")
        self._wake_failures.append(f"{self.phase}: {why}")
        if len(self._wake_failures) >= self._rules.attempts:
            self._enter(Phase.GENERATING)
            raise SwapError(
                f"no generator could be woken in {len(self._wake_failures)} attempts; the last: "
                f"{self._wake_failures[-1]}",
                hint="see the generators' logs",
            )
        self._pause(len(self._wake_failures))
        self._enter(Phase.WAKING)

    def abandon(self) -> None:
        """Leaves a swap amid a step, for an error that is not the step's: the side that had the devices has them."""
        if self.in_swap:
            self._enter(Phase.TRAINING if self.phase is Phase.OFFLOADING else Phase.GENERATING)

    def _return(self) -> None:
        self._returning = False
        self.taken_back += 1
        failures = len(self._failures)
        if failures >= self._rules.attempts:
            raise SwapError(
                f"the devices could not be taken in {failures} attempts; the last failed {self._failures[-1]}",
                hint="see the generators' logs; placement.step_timeout_s bounds each step",
            )
        self._pause(failures)

    def _pause(self, failures: int) -> None:
        self._not_before = self._clock() + self._rules.pause_s * 2 ** (failures - 1)

    def _enter(self, phase: Phase) -> None:
        now = self._clock()
        lasted = now - self._since
        self.seconds[self.phase] += lasted
        if self.in_swap:
            self.last[self.phase] = lasted
        self.phase, self._since = phase, now

    def _expect(self, phase: Phase) -> None:
        if self.phase is not phase:
            raise RuntimeError(f"the devices are {self.phase}, not {phase}")
