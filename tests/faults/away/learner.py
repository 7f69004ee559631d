"""A learner that computes nothing: the product's own loop, claimer, source, seeder and recovery, without engines."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, cast

from rollmesh.learner.algorithms.interface import Algorithm
from rollmesh.learner.algorithms.types import Needs
from rollmesh.learner.batching.partition import sequence_cost
from rollmesh.learner.batching.types import Packing
from rollmesh.learner.control_requests import ControlRequests
from rollmesh.learner.coordinator.batch_claim import BatchClaimer, ClaimRules
from rollmesh.learner.coordinator.checkpoint_scheduler import CheckpointScheduler
from rollmesh.learner.coordinator.prompt_seeder import PromptSeeder, SeedingRules
from rollmesh.learner.coordinator.step_recorder import FinishedStep, StepRecorder
from rollmesh.learner.coordinator.train_table import TrainTable
from rollmesh.learner.coordinator.training_loop import LoopRules, TrainingLoop
from rollmesh.learner.data.stream import PromptStream, TaskWindow
from rollmesh.learner.distributed.rank_group import RankGroup
from rollmesh.learner.distributed.trajectories import InlineTrajectories
from rollmesh.learner.distributed.worker import TrainResult
from rollmesh.learner.engines.interface import ACTOR
from rollmesh.learner.placement.turns import OwnDevices
from rollmesh.learner.recovery.consumption_log import LOG_NAME, ConsumptionLog
from rollmesh.learner.recovery.redis_recovery import RedisRecovery
from rollmesh.learner.rollouts.group_stream import GroupStream
from rollmesh.learner.runtime import LearnerRuntime
from rollmesh.learner.status import LearnerStatus
from rollmesh.mesh.config.learner import BatchSection
from rollmesh.mesh.errors import RollmeshError
from rollmesh.mesh.runtime.async_bridge import AsyncBridge
from rollmesh.mesh.trajectory.lineage import Lineage
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import membership_pb2
from tests.buffer.mesh_fixture import make_task
from tests.faults.away.member import PATIENCE_S, Member, say

# Prompt tasks that are pending, in batches.
_SEEDED_AHEAD = 8
_LAST_VERSION = 1 << 30


class _Prompts:
    """Tasks without end, by ordinal."""

    def after(self, ordinal: int, count: int) -> TaskWindow:
        return TaskWindow([make_task(ordinal + 1 + i) for i in range(count)], ordinal + count, end=False)


class _EveryGroup:
    """An algorithm that keeps every group."""

    needs = Needs()

    def group_stage(self, _group: object) -> None:
        return None

    def expected_cost(self, _group: object) -> float:
        return 1.0


class _Ranks:
    """One rank that computes nothing."""

    alone = True
    dp_sizes = frozenset({1})
    packing = Packing.SHARED
    keep_alive_s = 30.0
    sequence_cost = staticmethod(sequence_cost)

    def prepare(self, _plan: object) -> dict[str, str]:
        return {}

    def train(self, may_update: Any) -> TrainResult | None:
        return TrainResult({}, 0, {ACTOR: False}) if may_update() else None

    def keep_alive(self) -> None:
        pass


class Learner(Member):
    """Trains until its process ends; every batch is an event."""

    def __init__(self, run: str, mesh: str, folder: Path, groups: int, commit_every: int, bridge: AsyncBridge) -> None:
        super().__init__(mesh, membership_pb2.ROLE_LEARNER, f"learner-{run}")
        self._run, self._folder, self._bridge = run, folder, bridge
        self._batch = BatchSection(groups=groups)
        self._commit_every = commit_every
        self._status, self._controls = LearnerStatus(), ControlRequests()
        self._incarnation = 0
        self._announced: Any = None

    async def open(self) -> None:
        """Joins, takes the run over, seeds and samples."""
        await self.agent.start()
        self._incarnation = (await self.client.resume("train", self.agent.member_id, 0)).incarnation
        self.agent.set_status(incarnation=self._incarnation)
        self._recovery = RedisRecovery(
            self.client,
            member_id=self.agent.member_id,
            log=self._folder / LOG_NAME,
            incarnation=self._incarnation,
            takeovers={self._incarnation: 0},
            status=self._status,
            patience_s=PATIENCE_S,
        )
        self._seeder = PromptSeeder(
            self.client,
            cast(PromptStream, _Prompts()),
            self._recovery,
            SeedingRules(self._incarnation, self._batch.groups, window=_SEEDED_AHEAD * self._batch.groups),
            cursor=0,
            on_error=self._controls.fail,
        )
        self._recovery.on_recovered = self._seeder.rewind
        await self._seeder.start()
        self._source = GroupStream(self.client, self._incarnation, with_payloads=True)
        self._source.start()
        self._controls.wake = lambda: self._bridge.loop.call_soon_threadsafe(self._source.interrupt)

    def train(self) -> None:
        """The training thread."""
        algorithm = cast(Algorithm, _EveryGroup())
        claimer = BatchClaimer(
            self._bridge,
            TrainTable(self.client, self._source, self._seeder, self._recovery),
            algorithm,
            ConsumptionLog(self._folder / LOG_NAME),
            cast(CheckpointScheduler, self),
            ClaimRules(self._incarnation, resumed_at=0, groups=self._batch.groups, last_version=_LAST_VERSION),
        )
        ranks = cast(RankGroup, _Ranks())
        runtime = LearnerRuntime(self._bridge, ranks, InlineTrajectories(), self._controls, self._status)
        lineage = Lineage(((self._incarnation, 0),))
        rules = LoopRules(
            lineage, version=0, last_version=_LAST_VERSION, planned_end=_LAST_VERSION, batch=self._batch, max_skipped=1
        )
        loop = TrainingLoop(runtime, claimer, self, self, OwnDevices(), cast(StepRecorder, self), algorithm, rules)
        try:
            loop.run()
        except RollmeshError as error:
            say(self._run, "failed", error=repr(error))

    # Methods that the loop asks of an announcer, of a scheduler of checkpoints and of a recorder.

    eval_reward = None

    def start_clock(self) -> None:
        pass

    def request(self) -> None:
        """The buffer wants a checkpoint: there is one every few steps."""

    def publish(self, version: int, *, changed: bool) -> None:
        self._status.published = PolicyVersion(self._incarnation, version)
        self._announced = self._bridge.submit(self.client.set_policy_version(self._incarnation, version))

    def wait_in_force(self) -> None:
        self._bridge.result(self._announced, PATIENCE_S)

    async def in_force(self) -> None:
        await asyncio.wrap_future(self._announced)

    def serve_requests(self, version: int) -> None:
        pass

    def write_if_due(self, version: int, *, healthy: bool) -> float:
        assert healthy
        if version and version % self._commit_every == 0:
            self._bridge.call(self.client.commit("train", self._incarnation, version, "here"), PATIENCE_S)
            self._status.durable = (version, "here")
        return 0.0

    def metrics(self) -> dict[str, float]:
        return {}

    def record_step(self, finished: FinishedStep, _tokens: object) -> None:
        groups = [(group.group_id, group.leased.task.ordinal) for group in finished.groups]
        say(self._run, "trained", version=finished.trained_version, groups=groups, at=time.monotonic())
