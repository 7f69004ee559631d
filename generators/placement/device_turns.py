"""The sleep of a generator that shares its devices with a learner: calls in, actions on its components out.

Invariants:

- Actions come one after the other, in one task. A call waits until its goal is reached, or a call in the other
  direction replaces it. The work of a caller that gives up continues, and its next call waits for the same work.
- While it sleeps, credits are 0. Leases are held and rewards collected, and all that was sampled is in the buffer.
- Responses continue after the sleep. Pinned groups cannot, once the weights are gone: they are released.
- Nothing reaches the engine between two steps of waking but what they ask for.

Everything here happens in the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollmesh.generators.engines.interface import InferenceEngine
from rollmesh.generators.engines.process_memory import MemoryUse, read_memory_use, release_unused_memory
from rollmesh.generators.engines.types import Release, SleepLevel, WakeStep
from rollmesh.generators.placement.turn_state import (
    Action,
    Fence,
    Goal,
    Memory,
    SleepGoal,
    TurnState,
    WakeGoal,
    joined,
)
from rollmesh.generators.placement.weights_proof import (
    BY_DIGEST,
    BY_LOG_PROBS,
    ProbeTokens,
    check_log_probs,
    check_tensors,
)
from rollmesh.generators.rollout.awake_clock import AwakeClock
from rollmesh.generators.rollout.drafts import DraftUploader
from rollmesh.generators.rollout.rollout_manager import RolloutManager
from rollmesh.generators.weights.receiver import WeightReceiver
from rollmesh.mesh.errors import (
    ConfigError,
    PayloadError,
    RollmeshError,
    SwapError,
    UnreachableError,
    WeightsError,
    ended_by,
)
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import generator_pb2

log = logging.getLogger(__name__)
_ANY_POLICY = PolicyVersion(0, 0)
_DOING = {
    Action.FREEZE: "stops generating: the learner needs the devices",
    Action.RELEASE_KV_CACHE: "gives memory back to the learner",
    Action.RELEASE_WEIGHTS: "gives memory back to the learner",
    Action.TAKE_MEMORY: "wakes up: takes memory",
    Action.LOAD: "wakes up",
    Action.VERIFY: "wakes up: verifies its weights",
    Action.TAKE_KV_CACHE: "wakes up: takes memory for its KV cache",
    Action.RESUME: "wakes up",
}


@dataclass(frozen=True, slots=True)
class TurnParts:
    """The components of a generator that sleep and wake."""

    engine: InferenceEngine
    rollout: RolloutManager
    receiver: WeightReceiver
    drafts: DraftUploader


@dataclass(frozen=True, slots=True)
class TurnRules:
    """The rules of one generator.

    Attributes:
        shares_devices: it sleeps and wakes when a learner asks it to.
        release: the way in which it gives memory back.
        dtype: in which its engine computes.
    """

    shares_devices: bool
    release: Release = "memory"
    dtype: str = "float32"


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
        policy_in_force: as the mesh knows it.
        on_failure: called with an error that none of its calls is to blame for.

    Attributes:
        state: the present one.
        clock: stands still while it sleeps.
        wanted: set once an engine is to be loaded.
    """

    def __init__(
        self,
        rules: TurnRules,
        policy_in_force: Callable[[], PolicyVersion | None],
        on_failure: Callable[[RollmeshError], None],
    ) -> None:
        self._rules = rules
        self._policy_in_force = policy_in_force
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._fence = Fence()
        self._goal: Goal | None = None
        self._waiters: list[tuple[Goal, asyncio.Future[None]]] = []
        self._pursuit: asyncio.Task[None] | None = None
        self._action: Action | None = None
        self._step: asyncio.Task[None] | None = None
        self._parts: TurnParts | None = None
        self._attached = asyncio.Event()
        self._probe: ProbeTokens | None = None
        self._verified_by = ""
        self._awake = self._now = self._awake_peak = self._asleep_peak = MemoryUse()
        self._sleeps = self._wakes = self._freed = 0
        self._seconds: dict[Action, float] = {}
        self._closed = False
        self.state = TurnState.at_start(shares_devices=rules.shares_devices)
        self.clock = AwakeClock(asleep=rules.shares_devices)
        self.wanted = asyncio.Event()
        if not rules.shares_devices:
            self.wanted.set()

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
        if self._action is Action.LOAD and self._parts is not None:
            return f"{_DOING[Action.LOAD]}: {self._parts.receiver.waiting_reason}"
        if self._action is not None:
            return _DOING[self._action]
        if not self.asleep:
            return ""
        return "asleep while the learner trains" if self._wakes else "asleep until the learner's turn is over"

    @property
    def counts(self) -> TurnCounts:
        """Counts since the start."""
        return TurnCounts(self._sleeps, self._wakes, self.clock.slept_s, self._freed, dict(self._seconds))

    async def observe_memory(self) -> MemoryUse:
        """Measures the memory of its processes, for the peaks that are reported."""
        self._now = await asyncio.to_thread(read_memory_use)
        if self.state.generating or isinstance(self._goal, SleepGoal):
            self._awake_peak = self._awake_peak.max(self._now)
        else:
            self._asleep_peak = self._asleep_peak.max(self._now)
        return self._now

    # --------------------------------------------------------------------------------------------------- calls

    def attach(self, parts: TurnParts) -> None:
        """Gives it the components: the engine is started, and paused where the devices are shared."""
        self._parts = parts
        self._attached.set()

    async def sleep(self, request: generator_pb2.SleepRequest) -> generator_pb2.SleepResponse:
        """Sleeps at least as deep as asked for.

        Raises:
            FencedError: a later learner has taken over.
            RollmeshError: why it could not be done.
        """
        self._check(request.incarnation or self._incarnation_in_force)
        if request.level == generator_pb2.SLEEP_LEVEL_UNSPECIFIED:
            raise PayloadError("level", "none is given")
        await self._reach(SleepGoal(request.level))
        await self.observe_memory()
        self._freed = max(self._freed, self._awake.own - self._now.own)
        parts = self._parts
        return generator_pb2.SleepResponse(
            freed_bytes=self._freed,
            groups_held=parts.rollout.active_groups if parts is not None else 0,
            responses_frozen=parts.rollout.capacity.load.generating if parts is not None else 0,
            memory=self._now.to_proto(),
            peak=self._awake_peak.to_proto(),
            release=self._rules.release,
        )

    async def wake(self, request: generator_pb2.WakeRequest) -> generator_pb2.WakeResponse:
        """Takes the step that is asked for, and all before it.

        Raises:
            FencedError: a later learner has taken over.
            WeightsError: the weights in the engine are not those published.
            RollmeshError: why it could not be done.
        """
        self._check(request.incarnation)
        if request.step == generator_pb2.WAKE_STEP_UNSPECIFIED:
            raise PayloadError("step", "none is given")
        self._probe = ProbeTokens.of(request) or self._probe
        policy = PolicyVersion.from_proto(request.policy) if request.HasField("policy") else None
        await self._reach(WakeGoal(request.step, policy))
        await self.observe_memory()
        serving = self._serving
        return generator_pb2.WakeResponse(
            serving=serving.to_proto() if serving is not None else None,
            verified_by=self._verified_by if self.state.verified == serving else "",
            memory=self._now.to_proto(),
            peak=self._asleep_peak.to_proto(),
        )

    async def close(self) -> None:
        """Ends what is under way; calls that wait fail."""
        self._closed = True
        self._fail_waiters(_ending())
        if self._pursuit is not None:
            self._pursuit.cancel()
            await asyncio.wait({self._pursuit})

    # ------------------------------------------------------------------------------------------------ the way

    @property
    def _serving(self) -> PolicyVersion | None:
        return self._parts.receiver.serving if self._parts is not None else None

    @property
    def _incarnation_in_force(self) -> int:
        in_force = self._policy_in_force()
        return max(self._fence.seen, in_force.incarnation if in_force is not None else 0)

    def _check(self, incarnation: int) -> None:
        if not self._rules.shares_devices:
            raise ConfigError(
                "this generator has devices of its own",
                hint="rollmesh generator --shares-devices starts one that takes turns with the learner",
            )
        if self._closed:
            raise _ending()
        self._fence.check(incarnation, self._policy_in_force())

    async def _reach(self, goal: Goal) -> None:
        """Waits until a goal is reached; a caller that is cancelled leaves it to be reached."""
        done: asyncio.Future[None] = self._loop.create_future()
        turned = [waiter for waiter in self._waiters if type(waiter[0]) is not type(goal)]
        self._fail_waiters(SwapError("a later call has turned this generator the other way"), turned)
        self._waiters.append((goal, done))
        self._goal = joined(self._goal, goal)
        if turned and self._action is Action.LOAD and self._step is not None:
            # The weights may never come.
            self._step.cancel()
        if self._pursuit is None:
            self._pursuit = asyncio.create_task(self._pursue(), name="device-turn")
            self._pursuit.add_done_callback(self._on_pursuit_done)
        await done

    async def _pursue(self) -> None:
        while (goal := self._goal) is not None:
            for waiter in [*self._waiters]:
                if self.state.next_action(waiter[0], self._serving) is None:
                    self._answer(waiter)
            action = self.state.next_action(goal, self._serving)
            if action is None:
                self._goal = None
                return
            try:
                await self._take(action, goal)
            except RollmeshError as error:
                log.warning("%s failed: %s", action, error)
                if self._goal == goal:
                    self._goal = None
                    self._fail_waiters(error)

    async def _take(self, action: Action, goal: Goal) -> None:
        begin = self._loop.time()
        self.state.begin(action)
        self._action = action
        self._step = step = asyncio.create_task(self._perform(action, goal), name=f"turn-{action}")
        try:
            await asyncio.wait({step})
        finally:
            step.cancel()
            await asyncio.wait({step})
            self._action = self._step = None
        if step.cancelled():
            if self._goal == goal:
                raise UnreachableError(f"{action} ended because its connection was closed")
            return
        step.result()
        self.state.finish(action)
        self._seconds[action] = self._loop.time() - begin
        log.info("%s took %.2f s", action, self._seconds[action])

    async def _perform(self, action: Action, goal: Goal) -> None:
        if action is Action.TAKE_MEMORY and self._parts is None:
            self.wanted.set()
            await self._attached.wait()
            assert self._parts is not None, "attached"
            await _engine(self._parts.engine.pause())
            self.state.memory = Memory.ALL
            return
        parts = self._parts
        assert parts is not None, "only TAKE_MEMORY comes before"
        match action:
            case Action.FREEZE:
                await self._freeze(parts)
            case Action.RELEASE_KV_CACHE:
                await _engine(parts.engine.sleep(SleepLevel.WITHOUT_KV_CACHE))
            case Action.RELEASE_WEIGHTS:
                await self._release_weights(parts)
            case Action.TAKE_MEMORY:
                await _engine(parts.engine.wake(WakeStep.WEIGHTS))
            case Action.LOAD:
                await self._load(parts, goal)
            case Action.VERIFY:
                await self._verify(parts)
            case Action.TAKE_KV_CACHE:
                await _engine(parts.engine.wake(WakeStep.KV_CACHE))
            case Action.RESUME:
                await self._resume(parts)

    # ------------------------------------------------------------------------------------------------ actions

    async def _freeze(self, parts: TurnParts) -> None:
        self.clock.stop()
        self._sleeps += 1
        self._awake = await self.observe_memory()
        self._freed = 0
        parts.rollout.set_asleep(True)
        await parts.receiver.suspend()
        await _engine(parts.engine.pause())
        parts.rollout.flush_finished()
        await parts.drafts.write_all()

    async def _release_weights(self, parts: TurnParts) -> None:
        await parts.receiver.suspend()
        parts.rollout.release_pinned()
        await parts.receiver.forget_weights()
        await _engine(parts.engine.sleep(SleepLevel.WITHOUT_WEIGHTS))
        await asyncio.to_thread(release_unused_memory)
        self._asleep_peak = MemoryUse()

    async def _load(self, parts: TurnParts, goal: Goal) -> None:
        policy = goal.policy if isinstance(goal, WakeGoal) else None
        if self.asleep:
            # New weights would wait for them, and they for the engine.
            parts.rollout.release_pinned()
        parts.receiver.resume()
        try:
            await parts.receiver.serves(policy or _ANY_POLICY)
        finally:
            if self.asleep:
                await parts.receiver.suspend()

    async def _verify(self, parts: TurnParts) -> None:
        served = await _engine(parts.engine.weights())
        try:
            same = await check_tensors(served, parts.receiver.manifest(served.version))
        except WeightsError:
            await self._drop_wrong_weights(parts)
            raise
        self._verified_by = BY_DIGEST if same else ""
        self.state.verified = served.version

    async def _resume(self, parts: TurnParts) -> None:
        probe = self._probe
        if not self._verified_by and probe is not None and probe.policy == parts.receiver.serving:
            found = await _engine(parts.engine.probe(probe.ids))
            try:
                check_log_probs(found.log_probs, probe, self._rules.dtype)
            except WeightsError:
                await self._drop_wrong_weights(parts)
                raise
            self._verified_by = BY_LOG_PROBS
        await _engine(parts.engine.resume())
        parts.receiver.resume()
        parts.rollout.set_asleep(False)
        self.clock.go()
        self._wakes += 1
        self._awake_peak = await self.observe_memory()

    async def _drop_wrong_weights(self, parts: TurnParts) -> None:
        await parts.receiver.forget_weights()
        self.state.frozen = True
        self.state.begin(Action.RELEASE_WEIGHTS)
        await _engine(parts.engine.sleep(SleepLevel.WITHOUT_WEIGHTS))
        self.state.finish(Action.RELEASE_WEIGHTS)

    # ------------------------------------------------------------------------------------------------ waiters

    def _answer(self, waiter: tuple[Goal, asyncio.Future[None]]) -> None:
        self._waiters.remove(waiter)
        if not waiter[1].done():
            waiter[1].set_result(None)

    def _fail_waiters(
        self, error: RollmeshError, waiters: list[tuple[Goal, asyncio.Future[None]]] | None = None
    ) -> None:
        for waiter in self._waiters[:] if waiters is None else waiters:
            self._waiters.remove(waiter)
            if not waiter[1].done():
                waiter[1].set_exception(error)

    def _on_pursuit_done(self, pursuit: asyncio.Task[None]) -> None:
        self._pursuit = None
        if not pursuit.cancelled() and (error := pursuit.exception()) is not None:
            failure = ended_by(error, "a turn of the devices")
            self._fail_waiters(failure)
            self._on_failure(failure)
        elif self._goal is not None and not self._closed:
            # A call came at the very moment at which it ended.
            self._pursuit = asyncio.create_task(self._pursue(), name="device-turn")
            self._pursuit.add_done_callback(self._on_pursuit_done)


async def _engine(promise: Any) -> Any:
    return await asyncio.wrap_future(promise)


def _ending() -> UnreachableError:
    return UnreachableError("this generator is ending")
