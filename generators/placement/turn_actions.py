"""The actions of a generator that falls asleep and wakes up, on its components.

Each may be taken again after it has failed halfway. Waits end with the engine or the buffer, which are watched by
others; that for weights ends by cancellation.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

from rollmesh.generators.engines.interface import InferenceEngine
from rollmesh.generators.engines.process_memory import ProcessMemory, read_process_memory, release_unused_memory
from rollmesh.generators.engines.types import SleepLevel, WakeStep
from rollmesh.generators.placement.turn_state import Action, Goal, Memory, TurnState, WakeGoal
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
from rollmesh.mesh.config.memory_release import Release
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.trajectory.versions import PolicyVersion

log = logging.getLogger(__name__)
_ANY_POLICY = PolicyVersion(0, 0)


@dataclass(frozen=True, slots=True)
class TurnParts:
    """The components of a generator that sleep and wake."""

    engine: InferenceEngine
    rollout: RolloutManager
    receiver: WeightReceiver
    drafts: DraftUploader


@dataclass(frozen=True, slots=True)
class SleepRules:
    """The rules of one generator.

    Attributes:
        shares_devices: it sleeps and wakes when a learner asks it to.
        release: the way in which it gives memory back.
        dtype: in which its engine computes.
    """

    shares_devices: bool
    release: Release = "memory"
    dtype: str = "float32"


class MemoryPeaks:
    """The memory of the generator's processes in its turns and between them.

    Attributes:
        now: at the last look.
        awake_peak: since it woke last.
        asleep_peak: since it gave its memory back.
        freed: bytes that the last sleep has given back.
    """

    def __init__(self) -> None:
        self.now = self.awake_peak = self.asleep_peak = self._awake = ProcessMemory()
        self.freed = 0

    async def observe(self, *, awake: bool) -> None:
        """Looks, for the peak of one of the two states."""
        self.now = await asyncio.to_thread(read_process_memory)
        if awake:
            self.awake_peak = self.awake_peak.max(self.now)
        else:
            self.asleep_peak = self.asleep_peak.max(self.now)

    async def begin_sleep(self) -> None:
        """Remembers what is about to be given back."""
        await self.observe(awake=True)
        self._awake, self.freed = self.now, 0

    def record_freed(self) -> None:
        """Records what has been given back by the last look."""
        self.freed = max(self.freed, self._awake.own - self.now.own)

    async def end_sleep(self) -> None:
        """Begins the peak of a time awake."""
        await self.observe(awake=True)
        self.awake_peak = self.now


class TurnActions:
    """Takes actions on the components of a generator; `attach` gives it these once there are any.

    Args:
        rules: see there.
        state: of the generator; what an action finds out is recorded in it.

    Attributes:
        parts: the components; None before an engine was loaded.
        memory: of its processes.
        clock: stands still while it sleeps.
        wanted: set once an engine is to be loaded.
        probe: tokens of the learner's for the next proof.
        verified_by: the proof of the weights in service; empty without one.
        sleeps, wakes: since the start.
    """

    def __init__(self, rules: SleepRules, state: TurnState) -> None:
        self._dtype = rules.dtype
        self._state = state
        self._attached = asyncio.Event()
        self.parts: TurnParts | None = None
        self.memory = MemoryPeaks()
        self.clock = AwakeClock(asleep=rules.shares_devices)
        self.wanted = asyncio.Event()
        if not rules.shares_devices:
            self.wanted.set()
        self.probe: ProbeTokens | None = None
        self.verified_by = ""
        self.sleeps = self.wakes = 0

    def attach(self, parts: TurnParts) -> None:
        """Gives it the components; their engine is started."""
        self.parts = parts
        self._attached.set()

    async def take(self, action: Action, goal: Goal) -> None:
        """Takes an action on the way to a goal.

        Raises:
            RollmeshError: why it could not be done.
        """
        if action is Action.TAKE_MEMORY and self.parts is None:
            self.wanted.set()
            await self._attached.wait()
            assert self.parts is not None, "attached"
            await _engine(self.parts.engine.pause())
            self._state.memory = Memory.ALL
            return
        parts = self.parts
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

    def give_groups_back(self) -> None:
        """Gives back the groups whose responses are frozen; their drafts are stored."""
        parts = self.parts
        if parts is not None and parts.rollout.active_groups:
            log.warning("%d groups are given back: this generator does not wake up", parts.rollout.active_groups)
            parts.rollout.release_unfinished()

    async def _freeze(self, parts: TurnParts) -> None:
        if not self.clock.stopped:
            # One that is tried again belongs to the same sleep.
            self.clock.stop()
            self.sleeps += 1
            await self.memory.begin_sleep()
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
        self.memory.asleep_peak = ProcessMemory()

    async def _load(self, parts: TurnParts, goal: Goal) -> None:
        policy = goal.policy if isinstance(goal, WakeGoal) else None
        if not self._state.generating:
            # New weights would wait for them, and they for the engine.
            parts.rollout.release_pinned()
        parts.receiver.resume()
        try:
            await parts.receiver.serves(policy or _ANY_POLICY)
        finally:
            if not self._state.generating:
                await parts.receiver.suspend()

    async def _verify(self, parts: TurnParts) -> None:
        served = await _engine(parts.engine.weights())
        try:
            same = await check_tensors(served, parts.receiver.manifest(served.version))
        except WeightsError:
            await self._drop_wrong_weights(parts)
            raise
        self.verified_by = BY_DIGEST if same else ""
        self._state.verified = served.version

    async def _resume(self, parts: TurnParts) -> None:
        probe = self.probe
        if not self.verified_by and probe is not None and probe.policy == parts.receiver.serving:
            found = await _engine(parts.engine.probe(probe.ids))
            try:
                check_log_probs(found.log_probs, probe, self._dtype)
            except WeightsError:
                await self._drop_wrong_weights(parts)
                raise
            self.verified_by = BY_LOG_PROBS
        await _engine(parts.engine.resume())
        parts.receiver.resume()
        parts.rollout.set_asleep(False)
        self.clock.go()
        self.wakes += 1
        await self.memory.end_sleep()

    async def _drop_wrong_weights(self, parts: TurnParts) -> None:
        await parts.receiver.forget_weights()
        self._state.frozen = True
        self._state.begin(Action.RELEASE_WEIGHTS)
        await _engine(parts.engine.sleep(SleepLevel.WITHOUT_WEIGHTS))
        self._state.finish(Action.RELEASE_WEIGHTS)


async def _engine(promise: Any) -> Any:
    return await asyncio.wrap_future(promise)
