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
from rollmesh.generators.engines.types import SleepLevel, SleepReport, WakeStep
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
from rollmesh.mesh.config.derived.memory_release import Release
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
        device: on which it does.
    """

    shares_devices: bool
    release: Release = "memory"
    dtype: str = "float32"
    device: str = "cpu"


def freed_bytes(before: ProcessMemory, now: ProcessMemory, on_device: int) -> int:
    """Bytes that a sleep has given back: of the host, and of CUDA devices.

    Args:
        before: memory of the generator's processes before it; of devices, only what this process holds itself.
        now: after it.
        on_device: as its engine says, of devices.
    """
    # An engine without processes of its own holds this process's part of a device: its report is the same memory.
    return max(0, before.anonymous - now.anonymous + max(before.device - now.device, on_device))


class SleepMemory:
    """The memory that the generator gives back in its sleep.

    Attributes:
        freed: bytes that the last sleep has given back.
    """

    def __init__(self) -> None:
        self._awake = ProcessMemory()
        self._on_device = 0
        self.freed = 0

    async def begin(self) -> None:
        """Remembers what is about to be given back."""
        self._awake = await asyncio.to_thread(read_process_memory)
        self._on_device = self.freed = 0

    def add_on_device(self, nbytes: int) -> None:
        """Adds bytes of devices that the engine has given back."""
        self._on_device += nbytes

    async def measure(self) -> None:
        """Measures what has been given back by now."""
        now = await asyncio.to_thread(read_process_memory)
        self.freed = max(self.freed, freed_bytes(self._awake, now, self._on_device))


class TurnActions:
    """Takes actions on the components of a generator; `attach` gives it these once there are any.

    Args:
        rules: see there.
        state: of the generator; what an action finds out is recorded in it.

    Attributes:
        parts: the components; None before an engine was loaded.
        memory: that it gives back.
        clock: stands still while it sleeps.
        wanted: set once an engine is to be loaded.
        probe: tokens of the learner's for the next proof.
        verified_by: the proof of the weights in service; empty without one.
        sleeps, wakes: since the start.
    """

    def __init__(self, rules: SleepRules, state: TurnState) -> None:
        self._rules = rules
        self._state = state
        self._attached = asyncio.Event()
        self.parts: TurnParts | None = None
        self.memory = SleepMemory()
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
                await self._sleep(parts, SleepLevel.WITHOUT_KV_CACHE)
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
            await self.memory.begin()
        parts.rollout.set_asleep(True)
        await parts.receiver.suspend()
        await _engine(parts.engine.pause())
        parts.rollout.flush_finished()
        await parts.drafts.write_all()

    async def _release_weights(self, parts: TurnParts) -> None:
        await parts.receiver.suspend()
        parts.rollout.release_pinned()
        await parts.receiver.forget_weights()
        await self._sleep(parts, SleepLevel.WITHOUT_WEIGHTS)
        await asyncio.to_thread(release_unused_memory)

    async def _sleep(self, parts: TurnParts, level: SleepLevel) -> None:
        report: SleepReport = await _engine(parts.engine.sleep(level))
        if self._rules.device != "cpu" and self._rules.release == "memory":
            # Its processes may be others, whose devices cannot be read from here.
            self.memory.add_on_device(report.freed_bytes)

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
                check_log_probs(found.log_probs, probe, self._rules.dtype)
            except WeightsError:
                await self._drop_wrong_weights(parts)
                raise
            self.verified_by = BY_LOG_PROBS
        await _engine(parts.engine.resume())
        parts.receiver.resume()
        parts.rollout.set_asleep(False)
        self.clock.go()
        self.wakes += 1

    async def _drop_wrong_weights(self, parts: TurnParts) -> None:
        await parts.receiver.forget_weights()
        self._state.frozen = True
        self._state.begin(Action.RELEASE_WEIGHTS)
        await _engine(parts.engine.sleep(SleepLevel.WITHOUT_WEIGHTS))
        self._state.finish(Action.RELEASE_WEIGHTS)


async def _engine(promise: Any) -> Any:
    return await asyncio.wrap_future(promise)
