"""The process of a role: its model, its server, its place in the mesh. Every rank runs this.

Invariants: expected failures end with one log line and the error's exit code. Rank 0 joins the mesh when the model is
loaded, so that the learner finds no role that cannot compute. It ends with the run, on SIGTERM, or when the mesh is
lost; the other ranks follow it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from rollmesh.learner.algorithms.types import ModelRole
from rollmesh.learner.builders import build_algorithm, build_role, open_watch, set_learner_threads
from rollmesh.learner.distributed.rank_channel import RankChannel
from rollmesh.learner.engines.registry import check_backend
from rollmesh.learner.liveness.rank_exit import run_rank
from rollmesh.learner.liveness.rank_health import answer_health
from rollmesh.learner.liveness.start_notice import note_every_minute
from rollmesh.learner.model_files.location import resolve_model
from rollmesh.learner.role_service.role_ranks import RoleRanks, follow
from rollmesh.learner.role_service.role_worker import RoleWorker
from rollmesh.learner.role_service.servicer import SERVICE_NAME, RoleServicer
from rollmesh.learner.roles.agreement import agreed_settings, most_batch_bytes
from rollmesh.learner.start_requirements import check_start
from rollmesh.mesh.access.roles import Identity, Role
from rollmesh.mesh.access.secret_files import check_security
from rollmesh.mesh.access.token_file import identity_of
from rollmesh.mesh.config import Config
from rollmesh.mesh.diagnosis import SERVICE_NAME as DIAGNOSIS_SERVICE
from rollmesh.mesh.diagnosis import DiagnosisServicer
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.membership import MembershipAgent
from rollmesh.mesh.rpc.failover_channel import open_mesh
from rollmesh.mesh.rpc.server import bind, new_server
from rollmesh.mesh.runtime.async_bridge import AsyncBridge
from rollmesh.mesh.runtime.end_signals import end_signals
from rollmesh.mesh.runtime.hosts import host_id
from rollmesh.mesh.runtime.log_format import LogSettings, setup_logging
from rollmesh.mesh.runtime.memory_tuning import TENSOR_BYTES, freeze_heap, keep_freed_memory
from rollmesh.mesh.runtime.ranks import check_ranks, choose_interface
from rollmesh.mesh.runtime.service import add_health_and_reflection, advertised_address, set_serving, write_ready_file
from rollmesh.protos import diagnosis_pb2_grpc, membership_pb2, role_pb2, role_pb2_grpc

log = logging.getLogger(__name__)
_GRACE_S = 1.0
_LEAVE_S = 30.0


def run(
    config: Config, name: str, mesh: str, *, host: str | None = None, port: int = 0, ready_file: Path | None = None
) -> int:
    """Serves a role to the end of the run.

    Args:
        config: of the run.
        name: of the role.
        mesh: host:port of the buffer.
        host, port: to bind on rank 0; none: `network.host`, and a free port.
        ready_file: written by rank 0 when the role is in the mesh. Each rank r writes `NAME-r` next to it when it
            answers the health check, before it loads the model.

    Returns:
        The process exit code.
    """
    keep_freed_memory(TENSOR_BYTES)
    rank = int(os.environ.get("RANK", "0"))
    setup_logging(f"role-{name}" if rank == 0 else f"role-{name}-{rank}", LogSettings.of(config))

    def work() -> None:
        with ExitStack() as closers:
            _run(config, name, mesh, rank, closers, host=host, port=port, ready_file=ready_file)

    return run_rank(work)


def _run(
    config: Config,
    name: str,
    mesh: str,
    rank: int,
    closers: ExitStack,
    *,
    host: str | None,
    port: int,
    ready_file: Path | None,
) -> None:
    check_security(config.security, Identity(Role.MODEL), endpoint=False)
    check_ranks(config.security)
    choose_interface(config.learner.distributed.interface)
    set_learner_threads(config)
    bridge = AsyncBridge()
    closers.callback(bridge.close)
    if ready_file is not None:
        answer_health(config, Role.MODEL, bridge, closers, ready_file.with_stem(f"{ready_file.stem}-{rank}"))
    with note_every_minute("fetches the model"):
        model = resolve_model(config.model)
    config = config.model_copy(update={"model": model})
    check_start(config, elsewhere=True)
    check_backend(config.learner.engine_of(name), config.learner.engine_key(name))
    algorithm = build_algorithm(config)
    role = _role(config, name, algorithm.needs.roles)
    watch = closers.enter_context(open_watch(config))
    with watch.phase("load models"), note_every_minute("loads and checks the model"):
        budget = config.learner.batch.tokens_per_micro_batch
        worker = RoleWorker(role, algorithm, partial(build_role, config, role), token_budget=budget)
    channel = RankChannel(config.learner.distributed) if worker.engine.layout.processes > 1 else None
    freeze_heap()
    if rank > 0 and channel is not None:
        for number in end_signals():
            signal.signal(number, signal.SIG_IGN)
        follow(worker, channel, watch)
    else:
        ranks = RoleRanks(worker, channel, watch)
        description = role_pb2.DescribeRoleResponse(
            role=name,
            kind=role.kind,
            trained=role.trained,
            vocab_size=worker.engine.vocab_size,
            engine=config.learner.describe_engine(name),
            settings=agreed_settings(config, role),
        )
        member = _Member(config, mesh, ranks, description)
        _end_on_signals(member, bridge)
        serving = bridge.submit(member.serve(host or config.network.host, port, ready_file))
        ranks.serve()
        # It has stopped the ranks, and says why.
        serving.result(_LEAVE_S)
    with watch.phase("leave"):
        worker.close()


def _role(config: Config, name: str, roles: Sequence[ModelRole]) -> ModelRole:
    """The role of this name.

    Raises:
        ConfigError: the algorithm has no such role, or the learner holds its model.
    """
    known = {role.name: role for role in roles}
    if name not in known:
        raise ConfigError(
            f"algorithm {config.algorithm.name} has no role {name!r}", hint=f"its roles: {', '.join(known) or 'none'}"
        )
    if not config.learner.is_apart(name):
        raise ConfigError(
            f"learner.roles.{name}.at is learner: the learner's own processes hold the model",
            hint=f"set learner.roles.{name}.at: elsewhere for the learner too",
        )
    return known[name]


class _Member:
    """Rank 0 in the mesh; on the event loop.

    Args:
        config: of the run.
        mesh: address of the buffer.
        ranks: compute.
        description: of the role.
    """

    def __init__(self, config: Config, mesh: str, ranks: RoleRanks, description: role_pb2.DescribeRoleResponse) -> None:
        self._config = config
        self._mesh = mesh
        self._ranks = ranks
        self._description = description
        self._asked = asyncio.Event()

    def end(self) -> None:
        """Asks for the end; on the event loop."""
        self._asked.set()

    async def serve(self, host: str, port: int, ready_file: Path | None) -> None:
        """Serves until the end of the run, of the mesh, or of the process; then stops the ranks.

        Raises:
            RollmeshError: the mesh cannot be joined, or is lost; the address is taken.
        """
        try:
            await self._serve(host, port, ready_file)
        finally:
            self._ranks.stop()

    async def _serve(self, host: str, port: int, ready_file: Path | None) -> None:
        network, security = self._config.network, self._config.security
        identity = identity_of(security, Role.MODEL)
        server = new_server(security, identity, max_message_mb=network.max_message_mb)
        servicer = RoleServicer(self._description, self._ranks, most_bytes=most_batch_bytes(self._config))
        role_pb2_grpc.add_RoleModelServicer_to_server(servicer, server)
        diagnosis_pb2_grpc.add_DiagnosisServicer_to_server(DiagnosisServicer(), server)
        health = add_health_and_reflection(server, (SERVICE_NAME, DIAGNOSIS_SERVICE))
        bound = bind(server, host, port, security)
        await server.start()
        await set_serving(health, (SERVICE_NAME, DIAGNOSIS_SERVICE))
        address = advertised_address(host, bound, network.advertise, mesh=self._mesh)
        channel = open_mesh(self._mesh, security, identity, max_message_mb=network.max_message_mb)
        agent = MembershipAgent(
            channel,
            membership_pb2.ROLE_MODEL,
            member_id=identity.member_id,
            address=address,
            host_id=host_id(),
            timeout_s=network.rpc_timeout_s,
            retry_s=network.retry_s,
        )
        try:
            await agent.start()
            write_ready_file(ready_file, address)
            log.info("serving role %s at %s: %s", self._description.role, address, self._description.engine)
            await self._until_end(agent)
            await agent.leave()
            if agent.lost_error is not None:
                raise agent.lost_error
        finally:
            await agent.stop()
            await channel.close()
            await server.stop(_GRACE_S)

    async def _until_end(self, agent: MembershipAgent) -> None:
        ends = [asyncio.create_task(event.wait()) for event in (self._asked, agent.run_finished, agent.lost)]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()


def _end_on_signals(member: _Member, bridge: AsyncBridge) -> None:
    """Ends the role in order after a first signal, and at once after a second."""
    asked: list[int] = []

    def on_signal(number: int, _frame: object) -> None:
        if asked:
            os._exit(128 + number)
        asked.append(number)
        log.info("asked to end by %s", signal.Signals(number).name)
        bridge.loop.call_soon_threadsafe(member.end)

    for number in end_signals():
        signal.signal(number, on_signal)
