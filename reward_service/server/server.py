"""The gRPC server of the reward service: `Score`, `ScoreStream` and `Info` over a `ScoringEngine`.

Invariant: an answer leaves before the caller's deadline, with one result per item. An item that was not done in time
has an error result; its call does not fail.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from importlib import metadata
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

from rollmesh.mesh.access.credentials import SharedKey
from rollmesh.mesh.access.roles import Identity
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.diagnosis import SERVICE_NAME as DIAGNOSIS_SERVICE
from rollmesh.mesh.diagnosis import DiagnosisServicer
from rollmesh.mesh.errors import PayloadError
from rollmesh.mesh.rpc.server import bind, new_server
from rollmesh.mesh.runtime.service import add_health_and_reflection, set_serving
from rollmesh.mesh.telemetry.tracing import Tracer, no_traces
from rollmesh.mesh.wait import Wait
from rollmesh.protos import diagnosis_pb2_grpc, reward_pb2, reward_pb2_grpc
from rollmesh.reward_service.judge.accounts import Accounts
from rollmesh.reward_service.scoring.engine import ScoringEngine
from rollmesh.reward_service.server import stream as streams
from rollmesh.reward_service.server.item_spans import record_scores
from rollmesh.reward_service.server.metrics import RewardMetrics

log = logging.getLogger(__name__)
SERVICE_NAME = reward_pb2.DESCRIPTOR.services_by_name["Reward"].full_name


class RewardServicer(reward_pb2_grpc.RewardServicer):
    """Answers Score, ScoreStream and Info.

    Args:
        engine: scores the items.
        timeout_s: deadline of a call that comes without one, and the most that any item gets.
        tracer: of trajectories.
        max_bytes: of a request.
    """

    def __init__(
        self, engine: ScoringEngine, metrics: RewardMetrics, *, timeout_s: float, tracer: Tracer, max_bytes: int
    ) -> None:
        self._engine = engine
        self._max_bytes = max_bytes
        self._tracer = tracer
        self._metrics = metrics
        self._timeout_s = timeout_s

    async def Score(
        self, request: reward_pb2.ScoreRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> reward_pb2.ScoreResponse:
        return await self.answer(request, context.time_remaining())

    async def ScoreStream(
        self,
        request_iterator: AsyncIterator[reward_pb2.ScoreStreamRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[reward_pb2.ScoreResult]:
        stream = self.open_stream(context.time_remaining)
        # However the call ends: its generators may be left as they are.
        context.add_done_callback(lambda _: stream.stop())  # type: ignore[arg-type]  # the stubs have a class for it
        async for result in self.results_of(stream, request_iterator):
            yield result

    async def Info(
        self,
        request: reward_pb2.InfoRequest,  # noqa: ARG002 - the contract's signature
        context: grpc.aio.ServicerContext[Any, Any],  # noqa: ARG002 - the contract's signature
    ) -> reward_pb2.InfoResponse:
        return self.describe()

    async def answer(self, request: reward_pb2.ScoreRequest, remaining_s: float | None) -> reward_pb2.ScoreResponse:
        """Score, whatever the protocol; `remaining_s`: seconds of the caller's deadline, None without one.

        Raises:
            PayloadError: two items with the same item_id.
        """
        ids = {item.item_id for item in request.items}
        if len(ids) != len(request.items):
            raise PayloadError("items.item_id", "not unique in the request")
        began, began_ns = time.monotonic(), time.time_ns()
        with self._metrics.in_progress(len(request.items)):
            results = await self._engine.score(request.items, self._budget(remaining_s))
        self._metrics.record_results(results)
        self._metrics.record_call(time.monotonic() - began)
        if self._tracer.is_on:
            record_scores(self._tracer, request.items, results, began_ns)
        return reward_pb2.ScoreResponse(results=results)

    def open_stream(self, remaining_s: Callable[[], float | None]) -> streams.ScoreStream:
        """A stream of items, whatever the protocol; `remaining_s` as of `answer`, at present."""

        def budget(timeout_ms: int) -> float:
            rest = self._budget(remaining_s())
            return min(rest, timeout_ms / 1000) if timeout_ms else rest

        def record(item: reward_pb2.ScoreItem, result: reward_pb2.ScoreResult, began_ns: int) -> None:
            self._metrics.record_results([result])
            if self._tracer.is_on:
                record_scores(self._tracer, [item], [result], began_ns)

        return streams.ScoreStream(self._engine, budget, record, self._metrics.add_open)

    async def results_of(
        self, stream: streams.ScoreStream, requests: AsyncIterator[reward_pb2.ScoreStreamRequest]
    ) -> AsyncGenerator[reward_pb2.ScoreResult, None]:
        """The results of a stream, which is counted as one call."""
        began = time.monotonic()
        try:
            async for result in stream.results(requests):
                yield result
        finally:
            self._metrics.record_call(time.monotonic() - began)

    def describe(self) -> reward_pb2.InfoResponse:
        """Info, whatever the protocol."""
        needs = self._engine.needs
        return reward_pb2.InfoResponse(
            name="rollmesh",
            version=_version(),
            scorers=self._engine.scorers,
            max_bytes=self._max_bytes,
            needs_group=needs.needs_group,
            deterministic=needs.deterministic,
            wants_ids="ids" in needs.wants,
            wants_messages="messages" in needs.wants,
            wants_offsets="offsets" in needs.wants,
            wants_turns="turns" in needs.wants,
            wants_images="images" in needs.wants,
            streams=True,
        )

    def _budget(self, remaining: float | None) -> float:
        """Seconds for scoring: the rest of the caller's deadline, less the time for sending the answer."""
        if remaining is None:
            return self._timeout_s
        return max(0.0, min(self._timeout_s, remaining - max(0.02, min(0.5, 0.05 * remaining))))


def _version() -> str:
    try:
        return metadata.version("rollmesh")
    except metadata.PackageNotFoundError:
        return "0"


class RewardServer:
    """A running reward service; the same class serves the process, notebooks and tests.

    Args:
        engine: scores the items; closed with the server.
        timeout_s: the most seconds that a call gets.
        identity: of the service; none: as the token file makes it.
        key: what callers have to know of a service outside the mesh.
        tracer: of trajectories; none: there are no traces.
        rung: on which programs of the model run; 0 where none are run.

    Attributes:
        servicer: what answers; other protocols share it.
    """

    def __init__(
        self,
        engine: ScoringEngine,
        *,
        timeout_s: float = 10.0,
        security: SecuritySection | None = None,
        identity: Identity | None = None,
        key: SharedKey | None = None,
        max_message_mb: int = 64,
        tracer: Tracer | None = None,
        rung: int = 0,
    ) -> None:
        self._tracer = tracer or no_traces()
        self.metrics = RewardMetrics(engine, rung)
        self.metrics.registry.register(self._tracer.counts)
        self.port = 0
        self._engine = engine
        self._security = security or SecuritySection()
        self._server = new_server(self._security, identity, key=key, max_message_mb=max_message_mb)
        self.servicer = servicer = RewardServicer(
            engine, self.metrics, timeout_s=timeout_s, tracer=self._tracer, max_bytes=max_message_mb << 20
        )
        reward_pb2_grpc.add_RewardServicer_to_server(servicer, self._server)
        diagnosis_pb2_grpc.add_DiagnosisServicer_to_server(DiagnosisServicer(), self._server)
        self._health: health.aio.HealthServicer = add_health_and_reflection(
            self._server, [SERVICE_NAME, DIAGNOSIS_SERVICE]
        )

    def present_wait(self) -> Wait:
        """The reason why items wait although the service should be able to score them; empty while all is well."""
        return self._engine.present_wait()

    @property
    def judge(self) -> Accounts | None:
        """Limits, budget and counts of the judge; None without one."""
        return self._engine.judge

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Loads the reward functions, binds, serves and returns the port.

        Raises:
            ConfigError: a bind to others without protection.
            PortInUseError: the port is taken.
            RewardError: a function cannot be loaded.
        """
        try:
            await self._engine.start()
            self.port = bind(self._server, host, port, self._security)
        except BaseException:
            await self._engine.close()
            raise
        await self._server.start()
        await set_serving(self._health, [SERVICE_NAME, DIAGNOSIS_SERVICE])
        return self.port

    async def stop(self, grace_s: float = 2.0) -> None:
        """Reports NOT_SERVING, lets running calls end within `grace_s` seconds, and closes."""
        for name in ("", SERVICE_NAME):
            await self._health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._server.stop(grace_s)
        await self._engine.close()
        await asyncio.to_thread(self._tracer.close)
