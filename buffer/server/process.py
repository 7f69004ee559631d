"""The buffer service: embedded Redis (or any URL), the gRPC front, and its upkeep, as one process.

Invariants: the front keeps no state, so it may be killed and started again, or run several times on one Redis. The
embedded Redis is restarted with its data when it dies, and ends with this process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from rollmesh.buffer.policy.rules import Order, TableRules, rules_of
from rollmesh.buffer.redis_backend.access import RedisAccess
from rollmesh.buffer.redis_backend.embedded import EmbeddedRedis
from rollmesh.buffer.server import background_tasks, metrics
from rollmesh.buffer.server.custom_score import load_score
from rollmesh.buffer.server.front_context import DrawRules, FrontContext, MembershipRules
from rollmesh.buffer.server.membership import MembershipServicer
from rollmesh.buffer.server.registration import FrontRegistration
from rollmesh.buffer.server.servicer import DECODERS, BufferServicer
from rollmesh.buffer.store.keys import Keys
from rollmesh.buffer.store.side_files import SideFileStore
from rollmesh.buffer.store.store import Store
from rollmesh.mesh.access.roles import Identity, Role, new_identity
from rollmesh.mesh.access.secret_files import check_security
from rollmesh.mesh.access.token_file import Expiry, credentials_of
from rollmesh.mesh.config import Config
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.config.redis_url import without_login
from rollmesh.mesh.diagnosis import SERVICE_NAME as DIAGNOSIS_SERVICE
from rollmesh.mesh.diagnosis import DiagnosisServicer
from rollmesh.mesh.errors import RollmeshError, StoreError, ended_by
from rollmesh.mesh.http.metrics import metrics_server
from rollmesh.mesh.rpc.connection_options import keepalive_of
from rollmesh.mesh.rpc.server import bind, new_server
from rollmesh.mesh.runtime.log_format import LogSettings
from rollmesh.mesh.runtime.memory_tuning import freeze_heap, keep_freed_memory
from rollmesh.mesh.runtime.service import (
    Shutdown,
    add_health_and_reflection,
    advertised_address,
    end_task,
    run_service,
    set_serving,
    write_ready_file,
)
from rollmesh.mesh.tables import TABLES, TRAIN
from rollmesh.mesh.telemetry.tracing import open_tracer
from rollmesh.protos import buffer_pb2_grpc, diagnosis_pb2_grpc, membership_pb2_grpc

log = logging.getLogger(__name__)
SERVICES = ("rollmesh.v1.Buffer", "rollmesh.v1.Membership", DIAGNOSIS_SERVICE)
# Redis memory beyond the payload budget: metadata, prompts, and the payloads of one step (writes to admitted groups
# are never blocked by the budget).
_HEADROOM_BYTES = 512 << 20
_RESTARTS = 10
_RESTARTS_WITHIN_S = 600.0
_RESTART_WAIT_S = 0.5
_STOP_GRACE_S = 0.5
# Seconds that a front waits at its start for a Redis that reads its data.
_LOADING_S = 300.0


class BufferFront:
    """A front with its Redis. `start` and `stop` are for tests and for embedding; `run` is the process.

    Args:
        config: the run's configuration.
        host, port: address to bind; port 0 picks a free one.
    """

    def __init__(self, config: Config, *, host: str, port: int) -> None:
        self._config = config
        self._host = host
        self._port = port
        self._exit = AsyncExitStack()
        self._access: RedisAccess | None = None
        self.redis: EmbeddedRedis | None = None
        self.address = ""
        self.metrics: metrics.MetricsSnapshot | None = None
        self._front_id = new_identity(Role.BUFFER).member_id
        self._failure: asyncio.Future[RollmeshError] | None = None

    @property
    def run_name(self) -> str:
        return self._config.run.name

    @property
    def access(self) -> RedisAccess:
        """Redis, once started."""
        assert self._access is not None, "the service has not been started"
        return self._access

    async def start(self) -> None:
        """Starts everything; `address` holds afterwards.

        Raises:
            ConfigError: a file with a secret cannot be used; said before anything is started.
            StoreError: Redis cannot be started or refuses writes.
            PortInUseError: the address is taken.
        """
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        config = self._config
        check_security(config.security, Identity(Role.BUFFER), endpoint=False)
        self._failure = asyncio.get_running_loop().create_future()
        url = config.buffer.redis or await self._start_redis()
        front = await self._connect(url)
        identity = Identity(Role.BUFFER)
        credentials = credentials_of(config.security, identity)
        server = new_server(
            config.security,
            identity,
            max_message_mb=config.network.max_message_mb,
            keepalive_s=keepalive_of(config.buffer.lease_s),
            decoders=DECODERS,
        )
        buffer_pb2_grpc.add_BufferServicer_to_server(BufferServicer(front), server)
        membership_pb2_grpc.add_MembershipServicer_to_server(MembershipServicer(front, credentials), server)
        diagnosis = DiagnosisServicer(redis_clock=front.store.redis.time_ms, config_json=front.membership.config_json)
        diagnosis_pb2_grpc.add_DiagnosisServicer_to_server(diagnosis, server)
        health = add_health_and_reflection(server, SERVICES)
        port = bind(server, self._host, self._port, config.security)
        await server.start()
        self._exit.push_async_callback(front.drain, _STOP_GRACE_S)
        self._exit.push_async_callback(server.stop, _STOP_GRACE_S)
        self.metrics = metrics.MetricsSnapshot(front)
        registry = metrics.registry_of(self.metrics)
        registry.register(front.tracer.counts)
        network = config.network
        exporter = metrics_server(
            registry, network.metrics_host, config.security, port=network.metrics_port, enabled=network.metrics
        )
        await self._exit.enter_async_context(exporter)
        for job in (
            background_tasks.expire_leases(front),
            background_tasks.read_fleet(front),
            background_tasks.follow_hints(front),
            background_tasks.remove_ended_values(front),
            background_tasks.sweep_stored_values(front),
            background_tasks.sweep_side_files(front),
            metrics.refresh_forever(self.metrics),
            *(background_tasks.deal_admissions(front, table) for table in TABLES),
            *(background_tasks.evict(front, table) for table in TABLES if front.rules[table].bounded),
        ):
            self._background(job)
        await set_serving(health, SERVICES)
        self.address = advertised_address(self._host, port, config.network.advertise)
        await self._register(front, Expiry(credentials))
        log.info("buffer serves run %s at %s", config.run.name, self.address)

    async def _register(self, front: FrontContext, expiry: Expiry) -> None:
        """Lists this front, now that it answers, and takes it off before it stops answering."""

        async def bootstrap() -> None:
            await self._bootstrap(front.store, front.rules, sole=False)

        registration = FrontRegistration(
            front, front_id=self._front_id, address=self.address, bootstrap=bootstrap, expiry=expiry
        )
        await registration.register()
        self._exit.push_async_callback(registration.unregister)

        async def keep_alive() -> None:
            self._fail(await registration.keep_alive())

        self._background(keep_alive())

    async def _start_redis(self) -> str:
        config = self._config
        self.redis = EmbeddedRedis(
            config.run.folder / "redis",
            durability=config.buffer.durability,
            max_memory=config.buffer.max_bytes + config.buffer.max_bytes // 4 + _HEADROOM_BYTES,
        )
        self._exit.push_async_callback(self.redis.stop)
        await self.redis.start()
        self._background(self._keep_alive(self.redis))
        return self.redis.url

    async def _keep_alive(self, server: EmbeddedRedis) -> None:
        """Restarts Redis with its data when it dies; gives up where it dies again and again."""
        clock = asyncio.get_running_loop().time
        died: list[float] = []
        while len(died) < _RESTARTS:
            code = await server.wait_until_dead(self._config.resources.frozen_after_s)
            died = [*(at for at in died if clock() - at < _RESTARTS_WITHIN_S), clock()]
            why = server.exit_error(code)
            log.error("%s; restart %d of %d", why, len(died), _RESTARTS)
            try:
                await server.start()
            except StoreError as error:
                why = error
                log.error("%s", error)
                await asyncio.sleep(_RESTART_WAIT_S)
        self._fail(
            StoreError(
                f"redis-server died {_RESTARTS} times in {_RESTARTS_WITHIN_S:.0f} s, at last: {why.message}",
                hint=why.hint,
            )
        )

    def _fail(self, error: RollmeshError) -> None:
        if self._failure is not None and not self._failure.done():
            self._failure.set_result(error)

    async def failed(self) -> RollmeshError:
        """Waits until the service cannot continue; returns the reason."""
        assert self._failure is not None, "the service has not been started"
        return await asyncio.shield(self._failure)

    async def _connect(self, url: str) -> FrontContext:
        config = self._config
        rules = {table: rules_of(config, table) for table in TABLES}
        run_key = Keys(config.run.name).run
        access = self._access = RedisAccess(
            url, run_key, timeout_s=config.network.rpc_timeout_s, options=config.buffer.redis_options
        )
        self._exit.push_async_callback(access.close)
        side_folder = config.buffer.side_dir or config.run.folder / "side"
        store = Store(access, config.run.name, SideFileStore(side_folder, config.buffer.side_max_bytes))
        await access.wait_until_loaded(_LOADING_S)
        await access.check_acl(store.keys.payload(TRAIN, "none", 0, 0))
        tracer = open_tracer(
            config.telemetry, config.security, run=config.run.name, service="buffer", instance=self._front_id
        )
        self._exit.push_async_callback(asyncio.to_thread, tracer.close)
        # A front that owns its Redis has just started it, so no other front can be alive.
        config_json = await self._bootstrap(store, rules, sole=self.redis is not None)
        front = FrontContext(
            store=store,
            rules=rules,
            membership=MembershipRules(config.run.name, config_json, rules[TRAIN].lease_ms),
            draws=DrawRules(
                load_score(config.buffer.order) if rules[TRAIN].order is Order.SCORE else None,
                config.buffer.priority_exponent,
            ),
            max_message_bytes=config.network.max_message_mb << 20,
            tracer=tracer,
        )
        store.on_change(front.changes.notify)
        return front

    async def _bootstrap(self, store: Store, rules: dict[str, TableRules], *, sole: bool) -> str:
        return await store.bootstrap(
            rules,
            without_secrets(self._config).model_dump_json(),
            front_id=self._front_id,
            member_ttl_ms=rules[TRAIN].lease_ms,
            sole=sole,
        )

    def _background(self, job: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(job, name=getattr(job, "__name__", "upkeep"))
        task.add_done_callback(self._on_task_done)
        self._exit.push_async_callback(end_task, task)

    def _on_task_done(self, job: asyncio.Task[None]) -> None:
        """A front without its upkeep would let others wait for ever: it ends, and says why."""
        error = None if job.cancelled() else job.exception()
        if error is None:
            return
        log.error("%s failed", job.get_name(), exc_info=error)
        self._fail(ended_by(error, f"the front's background job {job.get_name()}"))

    async def stop(self) -> None:
        """Drains the front and ends Redis, in this order."""
        await self._exit.aclose()


def without_secrets(config: Config) -> Config:
    """The configuration as members receive it: without the login of Redis, and without this host's security."""
    url = None if config.buffer.redis is None else without_login(config.buffer.redis)
    buffer = config.buffer.model_copy(update={"redis": url})
    return config.model_copy(update={"buffer": buffer, "security": SecuritySection()})


def run(config: Config, *, host: str, port: int, ready_file: Path | None) -> int:
    """Runs the buffer service until it is asked to end; returns the process exit code."""

    async def main(shutdown: Shutdown) -> int:
        keep_freed_memory()
        service = BufferFront(config, host=host, port=port)
        await service.start()
        freeze_heap()
        write_ready_file(ready_file, service.address)
        try:
            return await _wait_for_end(service, shutdown)
        finally:
            await service.stop()

    return run_service("buffer", main, settings=LogSettings.of(config))


async def _wait_for_end(service: BufferFront, shutdown: Shutdown) -> int:
    requested = asyncio.create_task(shutdown.requested.wait())
    failure = asyncio.create_task(service.failed())
    await asyncio.wait({requested, failure}, return_when=asyncio.FIRST_COMPLETED)
    requested.cancel()
    if failure.done():
        raise failure.result()
    failure.cancel()
    return 0
