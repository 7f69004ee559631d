"""The reward service as a process: a server, its place in the mesh, and a graceful end.

Invariant: the ready file appears only when the service answers; on SIGTERM the mesh hears first, then running calls
end, then the process.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from rollmesh.mesh.access.roles import Identity, Role
from rollmesh.mesh.access.secret_files import check_security
from rollmesh.mesh.access.token_file import identity_of
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.scorers.parts import describe_all
from rollmesh.mesh.http.metrics import metrics_server
from rollmesh.mesh.membership import MembershipAgent
from rollmesh.mesh.rpc.failover_channel import open_mesh
from rollmesh.mesh.runtime.hosts import host_id
from rollmesh.mesh.runtime.log_format import LogSettings
from rollmesh.mesh.runtime.memory_tuning import freeze_heap
from rollmesh.mesh.runtime.service import Shutdown, advertised_address, run_service, write_ready_file
from rollmesh.mesh.telemetry.tracing import open_tracer
from rollmesh.protos import membership_pb2
from rollmesh.reward_service.judge.member import shared_judge
from rollmesh.reward_service.routing import split_routes
from rollmesh.reward_service.sandbox.configured import in_force
from rollmesh.reward_service.scoring.configured import configured_engine
from rollmesh.reward_service.server.http import http_server
from rollmesh.reward_service.server.server import RewardServer

log = logging.getLogger(__name__)
# Seconds between refreshes of the content of heartbeats.
_REPORT_INTERVAL_S = 1.0


def run(config: Config, *, host: str, port: int, mesh: str | None, ready_file: Path | None) -> int:
    """Serves until asked to end.

    Args:
        config: the run's configuration; `reward`, `network`, `security` and `logging` matter here.
        host, port: address to bind; port 0 picks a free one.
        mesh: address of the buffer, which lists the service; none: clients must be given the address.
        ready_file: written once the service answers.

    Returns:
        the process exit code.
    """
    return run_service(
        "reward",
        lambda shutdown: serve(config, shutdown, host=host, port=port, mesh=mesh, ready_file=ready_file),
        settings=LogSettings.of(config),
    )


async def serve(
    config: Config, shutdown: Shutdown, *, host: str, port: int, mesh: str | None, ready_file: Path | None
) -> int:
    """Serves until asked to end: the coroutine that `run` runs.

    Raises:
        RollmeshError: a reward function that cannot be loaded, a port that is taken, a mesh that stays away.
    """
    check_security(config.security, Identity(Role.REWARD), endpoint=False)
    reward = config.reward
    rung = (await in_force(reward.isolation)).rung if reward.runs_programs else 0
    engine = configured_engine(reward)
    identity = identity_of(config.security, Role.REWARD)
    server = RewardServer(
        engine,
        timeout_s=reward.timeout_s,
        security=config.security,
        identity=identity,
        max_message_mb=config.network.max_message_mb,
        tracer=open_tracer(
            config.telemetry, config.security, run=config.run.name, service="reward", instance=identity.member_id
        ),
        rung=rung,
    )
    bound = await server.start(host, port)
    freeze_heap()
    address = advertised_address(host, bound, config.network.advertise, mesh=mesh or "")
    network = config.network
    metrics = metrics_server(
        server.metrics.registry,
        network.metrics_host,
        config.security,
        port=network.metrics_port,
        enabled=network.metrics,
    )
    http = http_server(
        server.servicer,
        reward.http,
        host,
        config.security,
        max_message_mb=network.max_message_mb,
        late_store=reward.late.store,
    )
    try:
        async with metrics, http:
            if mesh is None:
                _write_ready(config, address, ready_file)
                await shutdown.requested.wait()
            else:
                await _serve_in_mesh(
                    config, shutdown, server, identity, mesh=mesh, address=address, ready_file=ready_file
                )
    finally:
        await server.stop()
    return 0


async def _serve_in_mesh(
    config: Config,
    shutdown: Shutdown,
    server: RewardServer,
    identity: Identity,
    *,
    mesh: str,
    address: str,
    ready_file: Path | None,
) -> None:
    """Advertises the service in the mesh until the run has ended or the process is asked to."""
    network = config.network
    channel = open_mesh(mesh, config.security, identity, max_message_mb=network.max_message_mb)
    agent = MembershipAgent(
        channel,
        membership_pb2.ROLE_REWARD,
        member_id=identity.member_id,
        address=address,
        host_id=host_id(),
        timeout_s=network.rpc_timeout_s,
        retry_s=network.retry_s,
    )
    try:
        # It asks nothing before it knows its share.
        async with shared_judge(server.judge, agent, membership_pb2.ROLE_REWARD, config.run.folder):
            if not await shutdown.run_until_requested(agent.start()):
                return
            _write_ready(config, address, ready_file)
            await _report_until_end(shutdown, agent, server)
        await agent.leave()
        if agent.lost_error is not None:
            raise agent.lost_error
    finally:
        await agent.stop()
        await channel.close()


def _write_ready(config: Config, address: str, ready_file: Path | None) -> None:
    write_ready_file(ready_file, address)
    reward = config.reward
    served = describe_all(reward.functions, split_routes(reward.by_data_source)[0])
    log.info("serving rewards at %s: %s", address, served)


async def _report_until_end(shutdown: Shutdown, agent: MembershipAgent, server: RewardServer) -> None:
    """Keeps the content of heartbeats fresh until shutdown, the end of the run, or the loss of the mesh."""
    ends = [asyncio.create_task(event.wait()) for event in (shutdown.requested, agent.run_finished, agent.lost)]
    try:
        while True:
            agent.set_status(gauges=server.metrics.gauges(), wait=server.present_wait())
            done, _ = await asyncio.wait(ends, timeout=_REPORT_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return
    finally:
        for end in ends:
            end.cancel()
