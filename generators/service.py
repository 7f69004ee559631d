"""The generator as a process: knows the mesh's address, learns everything else from it.

Invariants: the ready file says that the service answers, not that there is work: a generator may come long before the
learner. On a graceful end its leases are released before it leaves.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pydantic

from rollmesh.generators.components import MeshAccess
from rollmesh.generators.control_service import SERVICE_NAME, GeneratorControl
from rollmesh.generators.generator import Generator
from rollmesh.generators.weights.relay import Relay
from rollmesh.mesh.access.code_permissions import CodeRule, check_code
from rollmesh.mesh.access.credentials import Identity, Role
from rollmesh.mesh.access.secret_files import check_keys, check_security
from rollmesh.mesh.access.token_file import identity_of
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.http.metrics import metrics_server
from rollmesh.mesh.membership import MembershipAgent
from rollmesh.mesh.rpc.failover_channel import open_mesh
from rollmesh.mesh.rpc.server import bind, new_server
from rollmesh.mesh.runtime.hosts import host_id, is_loopback
from rollmesh.mesh.runtime.memory_tuning import TENSOR_BYTES, keep_freed_memory
from rollmesh.mesh.runtime.service import (
    Shutdown,
    add_health_and_reflection,
    advertised_address,
    run_service,
    set_serving,
    write_ready_file,
)
from rollmesh.mesh.runtime.threads import available_cores, plan_threads, thread_environment
from rollmesh.protos import generator_pb2_grpc, membership_pb2

log = logging.getLogger(__name__)


def run(
    mesh: str,
    *,
    host: str,
    port: int,
    advertise: str | None,
    metrics_host: str,
    metrics_port: int,
    member_id: str | None,
    threads: int | None,
    security: SecuritySection,
    code: CodeRule,
    ready_file: Path | None,
) -> int:
    """Generates until asked to end or the run is over.

    Args:
        mesh: host:port of the buffer.
        host, port: address to bind; port 0 picks a free one.
        advertise: host or host:port under which others reach this process, if not `host`.
        metrics_host: address that metrics bind.
        metrics_port: of it; 0: a free one.
        member_id: name in the mesh; none: a new one.
        threads: compute threads; none: as the run's configuration says.
        security: token and TLS of the mesh.
        code: what the mesh may have executed here.
        ready_file: written once the service answers.

    Returns:
        the process exit code.
    """
    keep_freed_memory(TENSOR_BYTES)
    identity = Identity(Role.GENERATOR, member_id) if member_id else identity_of(security, Role.GENERATOR)

    async def main(shutdown: Shutdown) -> int:
        return await serve(
            mesh,
            shutdown,
            host=host,
            port=port,
            advertise=advertise,
            metrics_host=metrics_host,
            metrics_port=metrics_port,
            identity=identity,
            threads=threads,
            security=security,
            code=code,
            ready_file=ready_file,
        )

    return run_service("generator", main)


async def serve(
    mesh: str,
    shutdown: Shutdown,
    *,
    host: str,
    port: int,
    advertise: str | None,
    metrics_host: str,
    metrics_port: int,
    identity: Identity,
    threads: int | None,
    security: SecuritySection,
    code: CodeRule,
    ready_file: Path | None,
) -> int:
    """Generates until asked to end or the run is over: the coroutine of `run`.

    Raises:
        RollmeshError: the port is taken, the mesh stays away or wants code executed that is not allowed, the model
            cannot be built, the engine fails.
    """
    check_security(security, identity, endpoint=True)
    server = new_server(security, identity)
    bound = bind(server, host, port, security)
    address = advertised_address(host, bound, advertise)
    channel = open_mesh(mesh, security, identity)
    agent = MembershipAgent(
        channel, membership_pb2.ROLE_GENERATOR, member_id=identity.member_id, address=address, host_id=host_id()
    )
    try:
        if not await shutdown.run_until_requested(agent.start()):
            return 0
        config = _configuration(agent, security)
        check_code(config, code)
        check_keys(config)
        logging.getLogger().setLevel(config.logging.level.upper())
        # Where no other host can reach this process there is none to relay to.
        relay = Relay("" if is_loopback(address.rpartition(":")[0]) else address)
        relay.add_to(server)
        access = MeshAccess(agent, channel, security, relay)
        planned = set_threads(config, threads)
        generator = Generator(config, access, threads=planned, host=host, advertise=advertise)
        control = GeneratorControl(generator, shutdown)
        generator_pb2_grpc.add_GeneratorControlServicer_to_server(control, server)
        health = add_health_and_reflection(server, [SERVICE_NAME])
        await server.start()
        await set_serving(health, [SERVICE_NAME])
        registry = generator.metrics.registry
        metrics = metrics_server(registry, metrics_host, security, port=metrics_port, enabled=config.network.metrics)
        async with metrics:
            write_ready_file(ready_file, address)
            try:
                await generator.run(shutdown)
            finally:
                # Generators that fetch from here find another source at once.
                relay.close()
            await agent.leave()
    finally:
        await agent.stop()
        await server.stop(1.0)
        await channel.close()
    return 0


def _configuration(agent: MembershipAgent, security: SecuritySection) -> Config:
    """The run's, with this host's own tokens and TLS."""
    try:
        return Config.model_validate_json(agent.config_json).model_copy(update={"security": security})
    except pydantic.ValidationError as error:
        raise ConfigError(
            f"the run's configuration cannot be read: {error}", hint="do all nodes run the same version of rollmesh?"
        ) from error


def set_threads(config: Config, threads: int | None) -> int:
    """Decides the compute threads of this process; has to come before the numerical libraries are loaded."""
    planned = plan_threads(
        available_cores(),
        ranks=config.learner.ranks,
        replicas=config.rollout.replicas,
        generator=threads or config.resources.generator_threads,
    ).generator
    os.environ.update(thread_environment(planned))
    log.info("computing with %d thread(s)", planned)
    return planned
