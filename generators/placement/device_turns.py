"""The sleep of a generator that shares its devices with a learner: calls in, actions on its components out.

Invariants:

- Actions come one after the other, in one task. A call waits until its goal is reached, or another call replaces it.
  The work of a caller that gives up continues for a while, and its next call waits for the same work.
- While it sleeps, credits are 0. Leases are held and rewards collected, and all that was sampled is in the buffer.
- Responses continue after the sleep. Pinned groups cannot, once the weights are gone: they are released.
- One that could not wake gives its groups back, and so does one that wakes after others: they continue them.
- Nothing reaches the engine between two steps of waking but what they ask for.

Everything here happens in the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rollmesh.generators.placement.callers import Callers
from rollmesh.generators.placement.turn_actions import SleepRules, TurnActions, TurnParts
from rollmesh.generators.placement.turn_state import (
    Action,
    Fence,
    Goal,
    SleepGoal,
    TurnState,
    WakeGoal,
    gives_groups_back,
    includes,
)
from rollmesh.generators.placement.weights_proof import ProbeTokens
from rollmesh.mesh.config.derived.memory_release import Release
from rollmesh.mesh.errors import (
    ConfigError,
    PayloadError,
    RollmeshError,
    UnreachableError,
    ended_by,
)
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import generator_pb2

log = logging.getLogger(__name__)
# Longest wait for the mesh to say which learner is in force.
_MESH_S = 5.0
# A learner that has not called for so long may be gone, or cut off.
_SILENT_S = 120.0
_DOING = {
    Action.FREEZE: "stops generating: the learner needs the devices",
    Action.RELEASE_KV_CACHE: "gives memory back to the learner",
    Action.RELEASE_WEIGHTS: "gives memory back to the learner",
    Action.TAKE_MEMORY: "wakes up: takes memory",
    Action.LOAD: "wakes up: loads its weights",
    Action.VERIFY: "wakes up: verifies its weights",
    Action.TAKE_KV_CACHE: "wakes up: takes memory for its KV cache",
    Action.RESUME: "wakes up",
}


@dataclass(frozen=True, slots=True)
class TurnCounts:
    """Counts since the start.

    Attributes:
        sleeps, wakes: turns that began, and those that ended.
        asleep_s: seconds for which nothing was decoded.
        freed_bytes: that the last sleep gave back.
        seconds: that each action took when it was done last.
    """

    sleeps: int
    wakes: int
    asleep_s: float
    freed_bytes: int
    seconds: dict[Action, float]


class DeviceTurns:
    """The turns of one generator; `attach` gives it the components once there are any.

    Args:
        rules: see there.
        policy_in_force: as the mesh has named it last.
        ask_mesh: asks it now; returns where it does not answer too.
        on_failure: called with an error that none of its calls is to blame for.

    Attributes:
        state: the present one.
        clock: stands still while it sleeps.
        wanted: set once an engine is to be loaded.
    """

    def __init__(
        self,
        rules: SleepRules,
        policy_in_force: Callable[[], PolicyVersion | None],
        ask_mesh: Callable[[], Awaitable[None]],
        on_failure: Callable[[RollmeshError], None],
    ) -> None:
        self._rules = rules
        self._policy_in_force = policy_in_force
        self._ask_mesh = ask_mesh
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._fence = Fence()
        self._callers = Callers(self._on_abandoned)
        self._pursuit: asyncio.Task[None] | None = None
        self._action: Action | None = None
        self._step: asyncio.Task[None] | None = None
        self._seconds: dict[Action, float] = {}
        self._closed = False
        self._called_at = self._loop.time()
        self.state = TurnState.at_start(shares_devices=rules.shares_devices)
        self._actions = TurnActions(rules, self.state)
        self.clock, self.wanted = self._actions.clock, self._actions.wanted

    # ------------------------------------------------------------------------------------------------- reports

    @property
    def shares_devices(self) -> bool:
        """It sleeps and wakes when a learner asks it to."""
        return self._rules.shares_devices

    @property
    def release(self) -> Release:
        """The way in which it gives memory back."""
        return self._rules.release

    @property
    def asleep(self) -> bool:
        """True while it does not generate."""
        return not self.state.generating

    @property
    def waiting_reason(self) -> str:
        """The reason why it generates nothing; empty while it is awake."""
        parts = self._actions.parts
        if self._action is Action.LOAD and parts is not None and (reason := parts.receiver.waiting_reason):
            return f"wakes up: {reason}"
        if self._action is not None:
            return _DOING[self._action]
        if not self.asleep:
            return ""
        if (goal := self._callers.abandoned) is not None:
            awaited = f"version {goal.policy}" if goal.policy else "weights"
            return f"asleep: no call waits for {awaited} any more"
        reason = "asleep while the learner trains" if self._actions.wakes else "asleep until the learner's turn is over"
        silent_s = self._loop.time() - self._called_at
        return f"{reason}; it has not called for {silent_s / 60:.0f} min" if silent_s > _SILENT_S else reason

    @property
    def counts(self) -> TurnCounts:
        """Counts since the start."""
        actions = self._actions
        return TurnCounts(actions.sleeps, actions.wakes, self.clock.slept_s, actions.memory.freed, dict(self._seconds))

    # --------------------------------------------------------------------------------------------------- calls

    def attach(self, parts: TurnParts) -> None:
        """Gives it the components: the engine is started, and paused where the devices are shared."""
        self._actions.attach(parts)

    async def sleep(self, request: generator_pb2.SleepRequest) -> generator_pb2.SleepResponse:
        """Sleeps at least as deep as asked for.

        Raises:
            FencedError: a later learner has taken over.
            RollmeshError: why it could not be done.
        """
        # A learner that is starting has no incarnation yet.
        await self._check(request.incarnation, starting=not request.incarnation)
        if request.level == generator_pb2.SLEEP_LEVEL_UNSPECIFIED:
            raise PayloadError("level", "none is given")
        await self._reach(SleepGoal(request.level))
        await self._actions.memory.measure()
        return generator_pb2.SleepResponse(freed_bytes=self._actions.memory.freed)

    async def wake(self, request: generator_pb2.WakeRequest) -> generator_pb2.WakeResponse:
        """Takes the step that is asked for, and all before it.

        Raises:
            FencedError: a later learner has taken over.
            WeightsError: the weights in the engine are not those published.
            RollmeshError: why it could not be done.
        """
        await self._check(request.incarnation)
        if request.step == generator_pb2.WAKE_STEP_UNSPECIFIED:
            raise PayloadError("step", "none is given")
        self._actions.probe = ProbeTokens.of(request) or self._actions.probe
        policy = PolicyVersion.from_proto(request.policy) if request.HasField("policy") else None
        if request.others_generate and self.state.frozen:
            self._actions.give_groups_back()
        await self._reach(WakeGoal(request.step, policy))
        proven = self.state.verified == self._serving
        return generator_pb2.WakeResponse(verified_by=self._actions.verified_by if proven else "")

    async def close(self) -> None:
        """Ends what is under way; calls that wait fail."""
        self._closed = True
        self._callers.close(_ending())
        if self._pursuit is not None:
            self._pursuit.cancel()
            await asyncio.wait({self._pursuit})

    # ------------------------------------------------------------------------------------------------ the way

    @property
    def _serving(self) -> PolicyVersion | None:
        parts = self._actions.parts
        return parts.receiver.serving if parts is not None else None

    async def _check(self, incarnation: int, *, starting: bool = False) -> None:
        if not self._rules.shares_devices:
            raise ConfigError(
                "this generator has devices of its own",
                hint="rollmesh generator --shares-devices starts one that takes turns with the learner",
            )
        self._called_at = self._loop.time()
        self._fence.observe(self._policy_in_force())
        if incarnation > self._fence.seen:
            # It may have taken the run over since the last heartbeat.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_MESH_S):
                    await self._ask_mesh()
            self._fence.observe(self._policy_in_force())
        if self._closed:
            raise _ending()
        if not starting:
            self._fence.check(incarnation)

    async def _reach(self, goal: Goal) -> None:
        """Waits until a goal is reached; a caller that is cancelled leaves it to be reached."""
        former = self._callers.goal
        caller = self._callers.add(goal)
        if former is not None and not includes(self._callers.goal or goal, former):
            self._stop_loading()
        if self._pursuit is None:
            self._begin_pursuit()
        try:
            await caller.done
        except RollmeshError:
            awaited = self._callers.waiting
            if not self._closed and self.asleep and gives_groups_back(goal, self._callers.goal, awaited=awaited):
                self._actions.give_groups_back()
            raise
        finally:
            self._callers.remove(caller)

    async def _pursue(self) -> None:
        while (goal := self._callers.goal) is not None:
            self._callers.answer(lambda reached: self.state.next_action(reached, self._serving) is None)
            action = self.state.next_action(goal, self._serving)
            if action is None:
                self._callers.end()
                return
            try:
                await self._take(action, goal)
            except RollmeshError as error:
                log.warning("%s failed: %s", action, error)
                if self._callers.goal == goal:
                    self._callers.end(error)

    async def _take(self, action: Action, goal: Goal) -> None:
        begin = self._loop.time()
        self.state.begin(action)
        self._action = action
        self._step = step = asyncio.create_task(self._actions.take(action, goal), name=f"turn-{action}")
        try:
            await asyncio.wait({step})
        finally:
            step.cancel()
            await asyncio.wait({step})
            self._action = self._step = None
        if step.cancelled():
            if self._callers.goal == goal:
                raise UnreachableError(f"{action} ended because its connection was closed")
            return
        step.result()
        self.state.finish(action)
        self._seconds[action] = self._loop.time() - begin
        log.info("%s took %.2f s", action, self._seconds[action])

    def _stop_loading(self) -> None:
        """Ends a wait for weights, which may never come."""
        if self._action is Action.LOAD and self._step is not None:
            self._step.cancel()

    def _on_abandoned(self) -> None:
        log.warning("the goal ends, for no call waits for it any more: %s", self._callers.abandoned)
        self._stop_loading()
        if self.asleep:
            self._actions.give_groups_back()

    def _begin_pursuit(self) -> None:
        self._pursuit = asyncio.create_task(self._pursue(), name="device-turn")
        self._pursuit.add_done_callback(self._on_pursuit_done)

    def _on_pursuit_done(self, pursuit: asyncio.Task[None]) -> None:
        self._pursuit = None
        if not pursuit.cancelled() and (error := pursuit.exception()) is not None:
            failure = ended_by(error, "a turn of the devices")
            self._callers.end(failure)
            self._on_failure(failure)
        elif self._callers.goal is not None and not self._closed:
            # A call came at the very moment at which it ended.
            self._begin_pursuit()


def _ending() -> UnreachableError:
    return UnreachableError("this generator is ending")
