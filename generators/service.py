"""The generator as a process: knows the mesh's address, learns everything else from it.

Invariants: the ready file says that the service answers, not that there is work: a generator may come long before the
learner. On a graceful end its leases are released before it leaves.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pydantic

from rollmesh.generators.components import MeshAccess
from rollmesh.generators.control_service import SERVICE_NAME, GeneratorControl
from rollmesh.generators.drain_times import USUAL, DrainTimes
from rollmesh.generators.generator import Generator
from rollmesh.generators.peers import called_peers
from rollmesh.generators.weights.relay import Relay
from rollmesh.mesh.access.code_permissions import CodeRule, check_code
from rollmesh.mesh.access.roles import Identity
from rollmesh.mesh.access.secret_files import check_keys, check_security
from rollmesh.mesh.addresses import host_of
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.diagnosis import SERVICE_NAME as DIAGNOSIS_SERVICE
from rollmesh.mesh.diagnosis import DiagnosisServicer
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.http.metrics import metrics_server
from rollmesh.mesh.membership import SHARES_DEVICES, MembershipAgent
from rollmesh.mesh.preemption.sources import NoticeSource
from rollmesh.mesh.preemption.watcher import shutdown_at_notice
from rollmesh.mesh.rpc.failover_channel import open_mesh
from rollmesh.mesh.rpc.server import bind, new_server
from rollmesh.mesh.runtime.bounded_exit import bound_exit
from rollmesh.mesh.runtime.hosts import host_id, is_loopback
from rollmesh.mesh.runtime.log_format import LogSettings, setup_logging
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
from rollmesh.mesh.telemetry.tracing import open_tracer
from rollmesh.protos import diagnosis_pb2_grpc, generator_pb2_grpc, membership_pb2

log = logging.getLogger(__name__)
# Longest time between the end of all work and the exit.
_EXIT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorOptions:
    """The settings of one generator, which the run's configuration does not know.

    Attributes:
        identity: its role, and its name in the mesh.
        security: token and TLS of the mesh.
        code: what the mesh may have executed here.
        host, port: address to bind; port 0 picks a free one.
        advertise: host or host:port under which others reach this process, if not `host`.
        metrics_host: address that metrics bind.
        metrics_port: of it; 0: a free one.
        threads: compute threads; none: as the run's configuration says.
        ready_file: written once the service answers.
        shares_devices: it takes turns with the learner on the same devices; none: as the run's configuration says.
        drain: times of an end in order.
        preemption: says when this machine is about to be taken away; none: nothing does.
    """

    identity: Identity
    security: SecuritySection
    code: CodeRule
    host: str = "127.0.0.1"
    port: int = 0
    advertise: str | None = None
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0
    threads: int | None = None
    ready_file: Path | None = None
    shares_devices: bool | None = None
    drain: DrainTimes = USUAL
    preemption: NoticeSource | None = None


def run(mesh: str, options: GeneratorOptions) -> int:
    """Generates until asked to end or the run is over.

    Args:
        mesh: host:port of the buffer.
        options: of this generator.

    Returns:
        the process exit code.
    """
    keep_freed_memory(TENSOR_BYTES)

    async def serve_and_exit(shutdown: Shutdown) -> int:
        async with shutdown_at_notice(options.preemption, shutdown):
            status = await serve(mesh, shutdown, options)
        # A thread may be loading the model.
        bound_exit(status, _EXIT_S)
        return status

    return run_service("generator", serve_and_exit)


async def serve(mesh: str, shutdown: Shutdown, options: GeneratorOptions) -> int:
    """Generates until asked to end or the run is over: the coroutine of `run`.

    Raises:
        RollmeshError: the port is taken, the mesh does not answer or asks for forbidden code, the model
            cannot be built, the engine fails.
    """
    identity, security, host = options.identity, options.security, options.host
    check_security(security, identity, endpoint=True)
    server = new_server(security, identity)
    bound = bind(server, host, options.port, security)
    address = advertised_address(host, bound, options.advertise, mesh=mesh)
    channel = open_mesh(mesh, security, identity)
    agent = MembershipAgent(
        channel, membership_pb2.ROLE_GENERATOR, member_id=identity.member_id, address=address, host_id=host_id()
    )
    closers = AsyncExitStack()
    try:
        if not await shutdown.run_until_requested(agent.start()):
            return 0
        config = _configuration(agent, security)
        check_code(config, options.code)
        check_keys(config)
        setup_logging("generator", LogSettings.of(config))
        told = options.shares_devices
        shares_devices = config.placement.all_take_turns if told is None else told
        # The learner finds the generators that it shares devices with by this.
        agent.set_status(gauges={SHARES_DEVICES: float(shares_devices)})
        # Where no other host can reach this process, it has no receiver to relay to.
        relay = Relay("" if is_loopback(host_of(address)) else address)
        relay.add_to(server)
        tracer = open_tracer(
            config.telemetry, security, run=agent.run_name, service="generator", instance=identity.member_id
        )
        closers.push_async_callback(asyncio.to_thread, tracer.close)
        access = MeshAccess(agent, channel, security, relay, tracer)
        planned = set_threads(config, options.threads)
        generator = Generator(
            config,
            access,
            threads=planned,
            host=host,
            advertise=options.advertise,
            shares_devices=shares_devices,
            drain=options.drain,
        )
        control = GeneratorControl(generator, shutdown)
        generator_pb2_grpc.add_GeneratorControlServicer_to_server(control, server)
        diagnosis_pb2_grpc.add_DiagnosisServicer_to_server(
            DiagnosisServicer(called_peers(agent, config, identity)), server
        )
        health = add_health_and_reflection(server, [SERVICE_NAME, DIAGNOSIS_SERVICE])
        await server.start()
        await set_serving(health, [SERVICE_NAME, DIAGNOSIS_SERVICE])
        registry = generator.metrics.registry
        registry.register(tracer.counts)
        metrics = metrics_server(
            registry, options.metrics_host, security, port=options.metrics_port, enabled=config.network.metrics
        )
        async with metrics:
            write_ready_file(options.ready_file, address)
            try:
                await generator.run(shutdown)
            finally:
                # Generators that fetch from here find another source at once.
                relay.close()
            await agent.leave()
    finally:
        await closers.aclose()
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
        in_turns=config.placement.all_take_turns,
        generator=threads or config.resources.generator_threads,
    ).generator
    os.environ.update(thread_environment(planned))
    log.info("computing with %d thread(s)", planned)
    return planned
