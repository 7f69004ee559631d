"""Items, and servers that answer as told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
import pytest_asyncio
from aiohttp import web

from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.config.scorers.http import HttpSection
from rollmesh.protos import reward_pb2, reward_pb2_grpc
from rollmesh.reward_service.client.client import RewardClient
from rollmesh.reward_service.scoring.engine import ScoringEngine
from rollmesh.reward_service.served_model import connection
from rollmesh.reward_service.server.http import http_server
from rollmesh.reward_service.server.server import RewardServer
from rollmesh.reward_service.workers import process
from tests.reward_service import forking_workers

MakeItem = Callable[..., reward_pb2.ScoreItem]
Behaviour = Callable[[reward_pb2.ScoreRequest, Any], Awaitable[reward_pb2.ScoreResponse]]
StreamBehaviour = Callable[[AsyncIterator[reward_pb2.ScoreStreamRequest]], AsyncIterator[reward_pb2.ScoreResult]]


@pytest.fixture(scope="module", autouse=True)
def _forked_workers() -> Iterator[None]:
    """Reward workers of this process, and processes of models, are forked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection, "_start", forking_workers.start_model)
        patch.setattr(process, "_start_program", forking_workers.start)
        yield


@pytest.fixture
def make_item() -> MakeItem:
    def make(item_id: str = "a", response: str = "42", truth: Any = "42", **fields: Any) -> reward_pb2.ScoreItem:
        values = {
            "group_id": "g",
            "data_source": "arithmetic",
            "prompt": "40+2=",
            "ground_truth_json": json.dumps(truth),
            "extra_info_json": "{}",
            "response_ids": [ord(c) for c in response],
        }
        return reward_pb2.ScoreItem(item_id=item_id, response=response, **(values | fields))

    return make


class ScriptedServer(reward_pb2_grpc.RewardServicer):
    """Counts requests and answers with `behaviour`; it can be killed in the middle of a call.

    Attributes:
        stream: answers streams, which Info then offers.
        info: fields of Info.
        streams: number of streams that have begun.
    """

    def __init__(self, behaviour: Behaviour, max_items: int | None) -> None:
        self.behaviour = behaviour
        self.stream: StreamBehaviour | None = None
        self.info: dict[str, Any] = {}
        self.streams = 0
        self.requests: list[reward_pb2.ScoreRequest] = []
        self.called = asyncio.Event()
        self.port = 0
        self._max_items = max_items
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return f"grpc://127.0.0.1:{self.port}"

    async def Score(self, request: Any, context: Any) -> reward_pb2.ScoreResponse:
        self.requests.append(request)
        self.called.set()
        return await self.behaviour(request, context)

    async def Info(self, request: Any, context: Any) -> reward_pb2.InfoResponse:
        if self._max_items is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no Info")
        fields = {"max_items": self._max_items or 0, "streams": self.stream is not None, **self.info}
        return reward_pb2.InfoResponse(name="scripted", version="0", **fields)

    async def ScoreStream(self, request_iterator: Any, context: Any) -> AsyncIterator[reward_pb2.ScoreResult]:
        assert self.stream is not None
        self.streams += 1
        async for result in self.stream(request_iterator):
            yield result

    async def start(self, port: int = 0) -> None:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        reward_pb2_grpc.add_RewardServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()

    async def kill(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
            self._server = None


async def score_ones(request: reward_pb2.ScoreRequest, _context: Any) -> reward_pb2.ScoreResponse:
    """The plainest right answer."""
    response = reward_pb2.ScoreResponse()
    for item in request.items:
        response.results.add(item_id=item.item_id).scored.total = 1.0
    return response


@pytest_asyncio.fixture
async def scripted() -> AsyncIterator[Callable[..., Awaitable[ScriptedServer]]]:
    """Starts servers: `await scripted(behaviour, max_items=None, port=0)`."""
    started: list[ScriptedServer] = []

    async def start(behaviour: Behaviour = score_ones, max_items: int | None = 0, port: int = 0) -> ScriptedServer:
        server = ScriptedServer(behaviour, max_items)
        await server.start(port)
        started.append(server)
        return server

    yield start
    for server in started:
        await server.kill()


@pytest_asyncio.fixture
async def serve_http() -> AsyncIterator[Callable[..., Awaitable[str]]]:
    """Starts our server over HTTP: `await serve_http(functions, key_file=None, security=None)` -> its URL."""
    async with AsyncExitStack() as closers:

        async def start(
            *functions: Any, key_file: Any = None, security: SecuritySection | None = None, **options: Any
        ) -> str:
            server = RewardServer(ScoringEngine(functions or ("auto",)), timeout_s=5.0)
            await server.start()
            closers.push_async_callback(server.stop, 0)
            section, security = HttpSection(port=0, key_file=key_file), security or SecuritySection()
            context = http_server(server.servicer, section, "localhost", security, **{"max_message_mb": 64, **options})
            return await closers.enter_async_context(context)

        yield start


@pytest_asyncio.fixture
async def scripted_http() -> AsyncIterator[Callable[..., Awaitable[str]]]:
    """Starts servers: `await scripted_http(handler)` -> URL; the handler gets each request, and its JSON or None."""
    runners: list[web.ServerRunner] = []

    async def start(handler: Callable[[web.BaseRequest, Any], Awaitable[web.StreamResponse]]) -> str:
        async def answer(request: web.BaseRequest) -> web.StreamResponse:
            return await handler(request, await request.json() if request.can_read_body else None)

        runner = web.ServerRunner(web.Server(answer, handler_cancellation=True), shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        runners.append(runner)
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


@pytest.fixture
def introduced(make_item: MakeItem) -> Callable[..., Awaitable[RewardClient]]:
    """`await introduced(servers, ...)`: a client that all servers have told their limits and have answered once."""

    async def make(servers: list[ScriptedServer], **options: Any) -> RewardClient:
        client = RewardClient([server.address for server in servers], **options)
        async with asyncio.timeout(180):
            while not all(server.requests for server in servers):
                await client.score([make_item("hello")], timeout_s=30)
        return client

    return make


@pytest_asyncio.fixture
async def serve() -> AsyncIterator[Callable[..., Awaitable[str]]]:
    """Starts our own server: `await serve(functions, ...)` -> its address."""
    started: list[RewardServer] = []

    async def start(*functions: Any, timeout_s: float = 5.0, **options: Any) -> str:
        server = RewardServer(ScoringEngine(functions or ("auto",), **options), timeout_s=timeout_s)
        started.append(server)
        return f"grpc://127.0.0.1:{await server.start()}"

    yield start
    for server in started:
        await server.stop(0)
