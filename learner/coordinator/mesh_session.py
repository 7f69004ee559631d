"""Rank 0's side of the mesh: its server, its membership, its takeover, and the tasks that serve the loop.

Everything here is asyncio and belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path

from rollmesh.buffer.client.client import BufferClient
from rollmesh.learner.control_requests import ControlRequests
from rollmesh.learner.coordinator.control_service import SERVICE_NAME as CONTROL_SERVICE
from rollmesh.learner.coordinator.control_service import LearnerControlService
from rollmesh.learner.coordinator.mesh_monitor import MeshMonitor
from rollmesh.learner.coordinator.prompt_seeder import PromptSeeder, SeedingRules
from rollmesh.learner.coordinator.train_table import TrainTable
from rollmesh.learner.data.stream import PromptStream
from rollmesh.learner.liveness.hang_guard import end_process_on_hang, hang_after_s
from rollmesh.learner.liveness.stall_reporter import StallReporter
from rollmesh.learner.metrics.sample_log import SampleFetcher
from rollmesh.learner.placement.turn_requests import TurnRequests
from rollmesh.learner.recording.recording import FOLDER, BatchRecorder
from rollmesh.learner.recovery.consumption_log import LOG_NAME
from rollmesh.learner.recovery.redis_recovery import RedisRecovery, RunHistory, assert_history
from rollmesh.learner.rollouts.group_stream import GroupStream
from rollmesh.learner.status import LearnerStatus
from rollmesh.learner.weights import WeightPublisher, WeightsService
from rollmesh.learner.weights.push_metrics import push_collector
from rollmesh.mesh.access.roles import Role
from rollmesh.mesh.access.token_file import identity_of
from rollmesh.mesh.config import Config
from rollmesh.mesh.diagnosis import SERVICE_NAME as DIAGNOSIS_SERVICE
from rollmesh.mesh.diagnosis import DiagnosisServicer, peers_of
from rollmesh.mesh.http.metrics import metrics_server
from rollmesh.mesh.membership import MembershipAgent
from rollmesh.mesh.rpc.failover_channel import open_mesh
from rollmesh.mesh.rpc.server import bind, new_server
from rollmesh.mesh.runtime.hosts import host_id
from rollmesh.mesh.runtime.service import add_health_and_reflection, advertised_address, set_serving, write_ready_file
from rollmesh.mesh.tables import TRAIN
from rollmesh.mesh.telemetry.tracing import Tracer, open_tracer
from rollmesh.mesh.trajectory.lineage import Lineage
from rollmesh.mesh.weights.contract import SERVICE_NAME as WEIGHTS_SERVICE
from rollmesh.protos import diagnosis_pb2_grpc, learner_pb2_grpc, membership_pb2, weights_pb2_grpc

log = logging.getLogger(__name__)
# Services that a learner calls: generators for turns on shared devices, and roles with processes of their own.
_CALLED = (membership_pb2.ROLE_BUFFER, membership_pb2.ROLE_MODEL, membership_pb2.ROLE_GENERATOR)
# Grace of the server for calls in flight when the learner ends.
_SERVER_GRACE_S = 1.0


class MeshSession:
    """The learner as a member of the mesh.

    Args:
        config: of the run.
        mesh: address of the buffer.
        publisher: the weights to serve.
        status, controls: of this learner.
        port: to bind; 0 picks a free one (the mesh's fixed port is the buffer's).

    Attributes:
        tracer: of trajectories, once it is open.
    """

    def __init__(
        self,
        config: Config,
        mesh: str,
        publisher: WeightPublisher,
        status: LearnerStatus,
        controls: ControlRequests,
        *,
        port: int = 0,
    ) -> None:
        self._config = config
        self._mesh = mesh
        self._publisher = publisher
        self._status = status
        self._controls = controls
        self._port = port
        # None: no devices are shared.
        self.turn_requests = TurnRequests() if config.placement.learner_takes_turns else None
        self._closers = AsyncExitStack()
        self._run_finished = False
        self.client: BufferClient
        self.agent: MembershipAgent
        self.monitor: MeshMonitor
        self.tracer: Tracer

    async def open(self, ready_file: Path | None) -> None:
        """Serves weights and control, and joins the mesh.

        Raises:
            PortInUseError: the address is taken.
            UnreachableError: the mesh did not answer.
        """
        network, security = self._config.network, self._config.security
        identity = identity_of(security, Role.LEARNER)
        server = new_server(security, identity, max_message_mb=network.max_message_mb)
        weights = WeightsService(self._publisher, self._config.weights.fanout)
        weights_pb2_grpc.add_WeightsServicer_to_server(weights, server)
        learner_pb2_grpc.add_LearnerControlServicer_to_server(
            LearnerControlService(self._status, self._controls, self.turn_requests), server
        )
        names = (WEIGHTS_SERVICE, CONTROL_SERVICE, DIAGNOSIS_SERVICE)
        health = add_health_and_reflection(server, names)
        port = bind(server, network.host, self._port, security)
        address = advertised_address(network.host, port, network.advertise, mesh=self._mesh)
        channel = open_mesh(self._mesh, security, identity, max_message_mb=network.max_message_mb)
        self.client = BufferClient(channel, timeout_s=network.rpc_timeout_s, retry_s=network.retry_s)
        self.agent = MembershipAgent(
            channel,
            membership_pb2.ROLE_LEARNER,
            member_id=identity.member_id,
            address=address,
            host_id=host_id(),
            timeout_s=network.rpc_timeout_s,
            retry_s=network.retry_s,
        )
        peers = peers_of(self.agent, security, identity, *_CALLED)
        diagnosis_pb2_grpc.add_DiagnosisServicer_to_server(DiagnosisServicer(peers), server)
        await server.start()
        self._closers.push_async_callback(server.stop, _SERVER_GRACE_S)
        # After the learner has left: generators whose stream ends ask the mesh at once. The grace is for fetches alone.
        self._closers.callback(weights.end_watches)
        self._closers.push_async_callback(channel.close)
        await set_serving(health, names)
        await self.agent.start()
        self.tracer = open_tracer(
            self._config.telemetry,
            security,
            run=self._config.run.name,
            service="learner",
            instance=identity.member_id,
        )
        self._closers.push_async_callback(asyncio.to_thread, self.tracer.close)
        self._closers.push_async_callback(self._leave)
        write_ready_file(ready_file, address)
        buffer = self._config.buffer
        stalls = StallReporter(
            self.client,
            self._status,
            self._controls,
            self._config.run.folder,
            stall_s=buffer.stall_s,
            limit_s=buffer.stall_limit_s,
        )
        self.monitor = MeshMonitor(
            self.client, self.agent, self._status, self._controls, stalls, batch=self._config.learner.batch.groups
        )
        registry = self.monitor.metrics.registry
        registry.register(push_collector(self._publisher.pushes))
        registry.register(self.tracer.counts)
        metrics = metrics_server(
            registry, network.metrics_host, security, port=network.metrics_port, enabled=network.metrics
        )
        await self._closers.enter_async_context(metrics)

    async def take_over(self, version: int, *, takeover: bool, force: bool) -> tuple[int, int]:
        """Becomes the learner of the run from `version` on.

        Returns:
            The incarnation, and the last ordinal that was seeded.

        Raises:
            TakeoverRefusedError: another learner holds the run.
            LostStateError: Redis may have lost acknowledged state: call `recover_for` first.
            DataError: `version` lies below the last commit, and `force` is not set.
        """
        response = await self.client.resume(TRAIN, self.agent.member_id, version, takeover=takeover, force=force)
        self.agent.set_status(incarnation=response.incarnation)
        log.info(
            "incarnation %d continues from version %d",
            response.incarnation,
            version,
            extra={"trained": response.trained, "returned": response.returned, "evicted": response.evicted_stale},
        )
        return response.incarnation, response.seeded

    async def recover_for(self, history: RunHistory) -> None:
        """Reports the groups that the predecessor has used, in its place."""
        await assert_history(self.client, self.agent.member_id, history, patience_s=self._config.network.retry_s)

    async def start(
        self,
        prompts: PromptStream,
        *,
        incarnation: int,
        takeovers: Mapping[int, int],
        cursor: int,
        with_payloads: bool,
        planned_end: int,
    ) -> TrainTable:
        """Begins to watch, to seed and to sample.

        Args:
            prompts: the training prompts.
            incarnation: of this learner.
            takeovers: the version from which each incarnation continued the run, this one among them.
            cursor: ordinal of the last task that was seeded.
            with_payloads: groups come with their payloads (one rank).
            planned_end: of the run, for recorded batches.

        Raises:
            DataError: no prompt can be used.
        """
        recovery = RedisRecovery(
            self.client,
            member_id=self.agent.member_id,
            log=self._config.run.folder / LOG_NAME,
            incarnation=incarnation,
            takeovers=takeovers,
            status=self._status,
            patience_s=self._config.network.retry_s,
        )
        self.monitor.start()
        self._closers.push_async_callback(self.monitor.close)
        watch = end_process_on_hang(
            self._status,
            self._controls,
            judges_steps=self._config.resources.frozen_after_s > 0,
            first_s=self._config.buffer.stall_limit_s or math.inf,
            move_s=self._config.placement.step_timeout_s,
            at_least_s=hang_after_s(self._config.learner),
        )
        self._closers.callback(asyncio.create_task(watch, name="hang watch").cancel)
        batch = self._config.learner.batch.groups
        seeder = PromptSeeder(
            self.client,
            prompts,
            recovery,
            SeedingRules(incarnation, batch, window=self._config.buffer.seed_ahead * batch),
            cursor=cursor,
            on_error=self._controls.fail,
        )
        recovery.on_recovered = seeder.rewind
        groups = GroupStream(self.client, incarnation, with_payloads=with_payloads)
        groups.on_waiting = self._set_waiting_reason
        recorder = None
        if self._config.logging.record:
            folder = self._config.run.folder / FOLDER
            lineage = Lineage(tuple(sorted(takeovers.items())))
            limit = self._config.logging.record_max_bytes
            recorder = BatchRecorder(folder, self.client, lineage, max_bytes=limit, planned_end=planned_end)
            self._closers.push_async_callback(recorder.close)
        await seeder.start()
        self._closers.push_async_callback(seeder.close)
        groups.start()
        self._closers.push_async_callback(groups.close)
        samples = SampleFetcher(self.client, self._config.logging.samples_per_step)
        return TrainTable(self.client, groups, seeder, recovery, recorder, samples)

    async def close(self, *, run_finished: bool) -> None:
        """Leaves the mesh in order and stops serving."""
        self._run_finished = run_finished
        await self._closers.aclose()

    async def _leave(self) -> None:
        await self.agent.leave(run_finished=self._run_finished)

    def _set_waiting_reason(self, reason: str) -> None:
        self._status.waiting_reason = reason
