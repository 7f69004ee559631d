"""The sleep of a generator as a state and the actions between its states: pure decisions.

A call names a goal, and `next_action` says what to do next on the way to it. A repeated call has nothing left to do. A
call that names a later goal includes the earlier ones, and one that comes amid the way continues from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

from rollmesh.mesh.errors import FencedError, UnreachableError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import generator_pb2


class Action(StrEnum):
    """An action of a generator on its way to a goal, as reports name it."""

    FREEZE = "freeze"
    RELEASE_KV_CACHE = "release_kv_cache"
    RELEASE_WEIGHTS = "release_weights"
    TAKE_MEMORY = "take_memory"
    LOAD = "load"
    VERIFY = "verify"
    TAKE_KV_CACHE = "take_kv_cache"
    RESUME = "resume"


class Memory(IntEnum):
    """The memory that the engine has; more of it with each value."""

    NONE = 0
    """Neither weights nor KV cache; before the first turn there is no engine."""
    PARTLY_RELEASED = 1
    """No KV cache; the weights are in host memory, or on their way out."""
    WEIGHTS = 2
    """That of the weights."""
    ALL = 3


@dataclass(frozen=True, slots=True)
class SleepGoal:
    """To sleep at least as deep as a level."""

    level: int

    def joined(self, other: SleepGoal) -> SleepGoal:
        """The goal that includes both."""
        return SleepGoal(max(self.level, other.level))


@dataclass(frozen=True, slots=True)
class WakeGoal:
    """To have taken a step of waking up, with at least a version in service."""

    step: int
    policy: PolicyVersion | None

    def joined(self, later: WakeGoal) -> WakeGoal:
        """The goal that includes both; a later call that names an earlier version replaces this one.

        The version of this one may never come.
        """
        if later.policy is not None and not _reaches(later.policy, self.policy):
            return later
        return WakeGoal(max(self.step, later.step), later.policy or self.policy)


Goal = SleepGoal | WakeGoal


def joined(present: Goal | None, new: Goal) -> Goal:
    """The goal after a call: it adds to one in the same direction, and replaces one in the other."""
    if isinstance(present, SleepGoal) and isinstance(new, SleepGoal):
        return present.joined(new)
    if isinstance(present, WakeGoal) and isinstance(new, WakeGoal):
        return present.joined(new)
    return new


def includes(goal: Goal, other: Goal) -> bool:
    """True where a generator that has reached a goal has reached another one too."""
    if isinstance(goal, SleepGoal) and isinstance(other, SleepGoal):
        return other.level <= goal.level
    if not isinstance(goal, WakeGoal) or not isinstance(other, WakeGoal):
        return False
    loads = other.step >= generator_pb2.WAKE_STEP_WEIGHTS
    return other.step <= goal.step and (not loads or _reaches(goal.policy, other.policy))


def gives_groups_back(missed: Goal, pursued: Goal | None, *, awaited: bool) -> bool:
    """True where a generator that sleeps on must not hold its groups: others may be awake, and continue them.

    A failure means so. Asked to sleep again, it holds them: all others sleep too.

    Args:
        missed: goal of a call that has failed.
        pursued: the present goal.
        awaited: another call waits for that.
    """
    return isinstance(missed, WakeGoal) and not isinstance(pursued, SleepGoal) and not awaited


@dataclass(slots=True)
class TurnState:
    """The present state.

    Attributes:
        generating: it admits groups and decodes.
        frozen: it does neither, and what it had sampled is stored. Amid a change both are false.
        memory: of the engine.
        verified: the version whose tensors were found to be those published; None: none in service.
    """

    generating: bool
    frozen: bool
    memory: Memory
    verified: PolicyVersion | None = None

    @classmethod
    def at_start(cls, *, shares_devices: bool) -> TurnState:
        """Asleep where the devices are shared, else awake."""
        if shares_devices:
            return cls(generating=False, frozen=True, memory=Memory.NONE)
        return cls(generating=True, frozen=False, memory=Memory.ALL)

    @property
    def level(self) -> generator_pb2.SleepLevel:
        """The level of sleep; unspecified while it generates."""
        if self.generating:
            return generator_pb2.SLEEP_LEVEL_UNSPECIFIED
        if self.memory is Memory.ALL:
            return generator_pb2.SLEEP_LEVEL_FROZEN
        if self.memory is Memory.NONE:
            return generator_pb2.SLEEP_LEVEL_WITHOUT_WEIGHTS
        return generator_pb2.SLEEP_LEVEL_WITHOUT_KV_CACHE

    def next_action(self, goal: Goal, serving: PolicyVersion | None) -> Action | None:
        """The next action on the way to a goal; None where it is reached.

        Args:
            goal: of the call.
            serving: version in service.
        """
        if isinstance(goal, SleepGoal):
            return self._towards_sleep(goal.level)
        return self._towards_waking(goal, serving)

    def begin(self, action: Action) -> None:
        """Records that an action has begun: what it may leave undone must not count as done."""
        match action:
            case Action.FREEZE:
                self.generating = False
            case Action.RESUME:
                self.frozen = False
            case Action.RELEASE_KV_CACHE | Action.RELEASE_WEIGHTS:
                self.memory = Memory.PARTLY_RELEASED
            case Action.LOAD | Action.VERIFY:
                self.verified = None
            case _:
                pass

    def finish(self, action: Action) -> None:
        """Records that an action is done; that of `VERIFY` is recorded by its caller."""
        match action:
            case Action.FREEZE:
                self.frozen = True
            case Action.RELEASE_WEIGHTS:
                self.memory, self.verified = Memory.NONE, None
            case Action.TAKE_MEMORY:
                self.memory = max(self.memory, Memory.WEIGHTS)
            case Action.TAKE_KV_CACHE:
                self.memory = Memory.ALL
            case Action.RESUME:
                self.generating = True
            case _:
                pass

    def _towards_sleep(self, level: int) -> Action | None:
        if not self.frozen:
            return Action.FREEZE
        if level >= generator_pb2.SLEEP_LEVEL_WITHOUT_WEIGHTS:
            return None if self.memory is Memory.NONE else Action.RELEASE_WEIGHTS
        if level >= generator_pb2.SLEEP_LEVEL_WITHOUT_KV_CACHE and self.memory is Memory.ALL:
            return Action.RELEASE_KV_CACHE
        return None

    def _towards_waking(self, goal: WakeGoal, serving: PolicyVersion | None) -> Action | None:
        if self.memory < Memory.WEIGHTS:
            return Action.TAKE_MEMORY
        if goal.step < generator_pb2.WAKE_STEP_WEIGHTS:
            return None
        if serving is None or not _reaches(serving, goal.policy):
            return Action.LOAD
        if goal.step < generator_pb2.WAKE_STEP_VERIFIED or self.generating:
            # Awake, it changes its weights by itself.
            return None
        if self.verified != serving:
            return Action.VERIFY
        if goal.step < generator_pb2.WAKE_STEP_GENERATING:
            return None
        return Action.TAKE_KV_CACHE if self.memory < Memory.ALL else Action.RESUME


class Fence:
    """Refuses calls of learners that a newer one has replaced, and of those that the mesh does not know.

    A caller cannot raise the number: the mesh alone hands incarnations out.

    Attributes:
        seen: the highest incarnation that the mesh has named here.
    """

    def __init__(self) -> None:
        self.seen = 0

    def observe(self, in_force: PolicyVersion | None) -> None:
        """Takes note of the policy in force, as the mesh names it."""
        self.seen = max(self.seen, in_force.incarnation if in_force is not None else 0)

    def check(self, incarnation: int) -> None:
        """Accepts a call of the present incarnation.

        Raises:
            FencedError: a higher one is known.
            UnreachableError: the mesh has not named it yet.
        """
        if incarnation < self.seen:
            raise FencedError(f"incarnation {incarnation} is over: {self.seen} has been seen")
        if incarnation > self.seen:
            raise UnreachableError(
                f"the mesh has not named incarnation {incarnation} yet, the last is {self.seen}",
                hint="a learner takes the run over before it calls; a mesh that has lost state learns of it again",
            )


def _reaches(have: PolicyVersion | None, wanted: PolicyVersion | None) -> bool:
    return wanted is None or (have is not None and wanted <= have)
