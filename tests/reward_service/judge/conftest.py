"""An OpenAI-compatible endpoint that answers as told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollmesh.mesh.config.reward import RewardSection
from rollmesh.mesh.config.scorers.judge import JudgeSection
from rollmesh.protos import reward_pb2
from rollmesh.reward_service.configured import with_configured
from rollmesh.reward_service.scoring.engine import ScoringEngine

Behaviour = Callable[[dict[str, Any]], Awaitable[web.StreamResponse]]
# Nothing waits for as long unless it hangs.
LONG_S = 100.0
# A request may take long, and none is begun later than a tenth of a second after its call.
BRIEF = {"timeout_s": 0.9 * LONG_S - 0.1}


def completion(content: str | None, **usage: int) -> web.Response:
    """A chat completion."""
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
    return web.json_response({"choices": [choice], **({"usage": usage} if usage else {})})


def verdict(score: float, **usage: int) -> web.Response:
    """A good answer to a question for a score."""
    return completion(json.dumps({"reason": "because", "score": score}), **usage)


def shown(body: dict[str, Any], name: str = "response") -> str:
    """A text that a question shows between marks."""
    return str(body["messages"][1]["content"]).partition(f"<{name} ")[2].partition(">\n")[2].partition(f"\n</{name}")[0]


class Endpoint:
    """Keeps each request's body and headers, and answers with `behaviour`."""

    def __init__(self) -> None:
        self.behaviour: Behaviour = self._by_length
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.running = 0
        self.most_running = 0
        self.released = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.paths.append(request.path)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self.behaviour(body)
        finally:
            self.running -= 1

    async def hang(self, _body: dict[str, Any]) -> web.StreamResponse:
        """Gives no answer before the test ends."""
        await self.released.wait()
        return web.Response(status=500)

    async def _by_length(self, body: dict[str, Any]) -> web.StreamResponse:
        return verdict(float(len(shown(body))))


@pytest_asyncio.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    """By default it gives a response as many points as it has characters."""
    made = Endpoint()
    yield made
    made.released.set()


@pytest_asyncio.fixture
async def base_url(endpoint: Endpoint) -> AsyncIterator[str]:
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", endpoint.answer)
    server = TestServer(application)
    await server.start_server(shutdown_timeout=0.1)
    yield str(server.make_url("/v1"))
    endpoint.released.set()
    await server.close()


Score = Callable[..., Awaitable[list[reward_pb2.ScoreResult]]]


@pytest_asyncio.fixture
async def judge(base_url: str) -> AsyncIterator[Callable[..., Score]]:
    """`judge(**settings)` gives a function that scores responses of one group as a reward service would."""
    engines: list[ScoringEngine] = []

    def make(**settings: Any) -> Score:
        given = {"base_url": base_url, "model": "m", "timeout_s": 0.3 * LONG_S, **settings}
        section = RewardSection(functions=["judge"], judge=JudgeSection(**given), scorer_timeout_s=LONG_S)
        engine = ScoringEngine(
            *with_configured(section, section.functions, {}), workers=1, call_timeout_s=section.scorer_timeout_s
        )
        engines.append(engine)

        async def score(*responses: str, truth: Any = None) -> list[reward_pb2.ScoreResult]:
            items = [
                reward_pb2.ScoreItem(
                    item_id=str(place),
                    group_id="g",
                    prompt="say something",
                    response=response,
                    ground_truth_json="" if truth is None else json.dumps(truth),
                )
                for place, response in enumerate(responses)
            ]
            return await engine.score(items, 2 * LONG_S)

        return score

    yield make
    for engine in engines:
        await engine.close()


@pytest.fixture
def totals() -> Callable[[list[reward_pb2.ScoreResult]], list[Any]]:
    """Per result its reward, or the code of its error."""

    def read(results: list[reward_pb2.ScoreResult]) -> list[Any]:
        return [
            result.scored.total if result.HasField("scored") else result.error.code or result.unscorable.reason
            for result in results
        ]

    return read
