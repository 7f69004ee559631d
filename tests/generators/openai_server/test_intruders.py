"""Each route of the endpoint, tried by everyone who must not get in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import httpx
from aiohttp import web

from rollmesh.generators.engines.types import SamplingParams
from rollmesh.generators.openai_server.conversations.sessions import SamplingPolicy, Session
from rollmesh.mesh.config.network import SecuritySection
from tests.generators.openai_server.world import Serving, another_server
from tests.secrets_here import TOKEN, write_secret

T = TypeVar("T")
KEY = "the key of the endpoint"
_BODY = {"model": "tiny", "messages": [{"role": "user", "content": "the"}], "prompt": "the", "max_tokens": 1}
_OPEN, _TRAINING, _UNKNOWN = "a client's", "training's", "nobody's"


async def test_no_intruder_gets_in(serving: Serving, tmp_path: Path) -> None:
    kept = serving.endpoint.sessions
    behind = SecuritySection(endpoint_key_file=write_secret(tmp_path / "key", KEY))
    with _trained(serving) as mine, _trained(serving) as other, another_server(serving, behind) as server:
        agents, public = (runner.app for runner in server._runners)
        names = {_OPEN: "open", _TRAINING: mine.name, _UNKNOWN: "unknown"}
        opened = serving.run(lambda: _done(lambda: kept.get_or_create(names[_OPEN])))
        strangers = {
            "no key": None,
            "a wrong key": "let me in",
            "half of the key": KEY[:5],
            "the mesh's token": TOKEN,
            "the key of another session": other.key,
        }
        before, wrong, tried = len(kept), [], 0
        async with httpx.AsyncClient(timeout=180) as client:
            for url, app in ((server.url, public), (server.agents_url, agents)):
                for method, path in _routes(app):
                    for whose, name in names.items():
                        if "{session}" not in path and whose != _UNKNOWN:
                            continue
                        target = url + path.format(session=name, model="tiny")
                        keys = strangers | ({"the endpoint's key": KEY} if whose == _TRAINING else {})
                        for what, key in keys.items():
                            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
                            body = _BODY if method == "POST" else None
                            status = (await client.request(method, target, headers=headers, json=body)).status_code
                            tried += 1
                            if status != _refused_as(app is agents, whose, path):
                                wrong.append((target, method, whose, what, status))
        assert not wrong
        assert tried > 150
        assert len(kept) == before
        assert (mine.calls, other.calls) == (0, 0)
        serving.run(lambda: _done(lambda: kept.forget(opened)))


def _refused_as(agents: bool, whose: str, path: str) -> int:
    """Names of sessions of training cannot be guessed: an agent that has one and comes late is told so."""
    if not agents or whose == _TRAINING:
        return 401
    return 410 if "{session}" in path else 404


def _routes(app: web.Application) -> list[tuple[str, str]]:
    """Methods and paths, as the server itself has them; and one that it has not."""
    found = [(route.method, route.resource.canonical) for route in app.router.routes() if route.resource]
    assert len(found) >= 10
    return [*found, ("GET", "/elsewhere")]


@contextmanager
def _trained(serving: Serving) -> Iterator[Session]:
    sessions = serving.endpoint.sessions
    policy = SamplingPolicy((5,), SamplingParams(max_tokens=20))
    session = serving.run(lambda: _done(lambda: sessions.open_training(policy)))
    try:
        yield session
    finally:
        serving.run(lambda: _done(lambda: sessions.forget(session)))


async def _done(what: Callable[[], T]) -> T:
    return what()
