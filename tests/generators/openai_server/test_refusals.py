"""Refusals and their words: the package's own errors come out."""

from __future__ import annotations

import asyncio
import http.client
import ipaddress
import json
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from rollmesh.generators.engines.types import GenerationRequest, GenerationResult, SamplingParams
from rollmesh.generators.openai_server.conversations.sessions import SamplingPolicy
from rollmesh.generators.openai_server.errors import ApiError
from rollmesh.generators.openai_server.origins import check_caller
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import ConfigError, PortInUseError
from rollmesh.mesh.trajectory.payload_codec import Trajectory
from tests.certificates import Authority
from tests.generators.openai_server.world import Serving, another_server, soon
from tests.secrets_here import TOKEN, write_secret

T = TypeVar("T")
HELLO: Any = [{"role": "user", "content": "the"}]


@contextmanager
def served_by(serving: Serving, security: SecuritySection, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Another server for the same answers."""
    with another_server(serving, security, host, port) as server:
        yield server.url


@pytest.fixture
def client(serving: Serving) -> OpenAI:
    return OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"extra_body": {"nonsense": 1}}, "nonsense", "unknown_parameter"),
        ({"temperature": 3}, "temperature", "invalid_value"),
        ({"top_p": 0}, "top_p", "invalid_value"),
        ({"extra_body": {"top_k": 2**63}}, "top_k", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"presence_penalty": 0.5}, "presence_penalty", "unsupported_parameter"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "unsupported_parameter"),
        ({"response_format": {"type": "grammar"}}, "response_format", "invalid_value"),
        ({"top_logprobs": 2}, "top_logprobs", None),
        ({"messages": []}, "messages", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
            "unsupported_content",
        ),
        ({"messages": [{"content": "x"}]}, "messages[0].role", None),
        ({"messages": [{"role": "user", "content": "to be or not " * 99}]}, "messages", "context_length_exceeded"),
    ],
)
def test_a_bad_chat_is_named(client: OpenAI, fields: dict[str, Any], param: str, code: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{"model": "tiny", "messages": HELLO, **fields})
    assert (refused.value.param, refused.value.code) == (param, code)
    assert refused.value.type == "invalid_request_error"


def test_what_means_nothing_here_is_taken(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=2, user="me", store=False, metadata={"a": "b"}, service_tier="auto",
        seed=-7, presence_penalty=0, logit_bias={}, response_format={"type": "text"}, parallel_tool_calls=True,
    )  # fmt: skip
    assert answer.usage is not None
    with pytest.raises(openai.BadRequestError, match="echo"):
        client.completions.create(model="tiny", prompt="the", echo=True)
    with pytest.raises(openai.BadRequestError, match="best_of"):
        client.completions.create(model="tiny", prompt="the", best_of=3)
    with pytest.raises(openai.BadRequestError, match="at most 400"):
        client.completions.create(model="tiny", prompt=[5] * 400)
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny", prompt=[100_000])
    with pytest.raises(openai.NotFoundError, match="'tiny' is served here"):
        client.chat.completions.create(model="gpt-4o", messages=HELLO)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="tiny", input="the")
    with pytest.raises(openai.BadRequestError, match="not JSON"):
        client.post("/chat/completions", cast_to=object, content=b"{", options={"headers": {}})


def test_a_path_that_is_not_served_is_named_with_those_that_are(serving: Serving, client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=r"POST /v1/responses: .* set the client to chat completions"):
        client.responses.create(model="tiny", input="the")
    astray = client.with_options(base_url=serving.url)
    with pytest.raises(openai.NotFoundError, match=r"POST /chat/completions: .* a client's base URL ends with /v1"):
        astray.chat.completions.create(model="tiny", messages=HELLO)
    assert client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=1).choices


def test_what_the_engine_refuses_late_is_the_callers_to_mend(
    serving: Serving, client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(requests: Sequence[GenerationRequest]) -> None:
        results = [GenerationResult(item.request_id, Trajectory.empty(), "aborted", refusal="no") for item in requests]
        asyncio.get_running_loop().call_soon(serving.endpoint.accept_results, results)

    monkeypatch.setattr(serving.engine, "submit", refuse)
    with pytest.raises(openai.BadRequestError, match="no"):
        client.chat.completions.create(model="tiny", messages=HELLO)


async def test_too_much_at_once_and_too_many_sessions(serving: Serving) -> None:
    client = AsyncOpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0)
    serving.engine.pause().result(180)
    try:
        running = asyncio.create_task(client.chat.completions.create(model="tiny", messages=HELLO, n=64, max_tokens=1))
        await soon(lambda: serving.engine.status().queued + serving.engine.status().active == 64)
        with pytest.raises(openai.RateLimitError) as refused:
            await client.chat.completions.create(model="tiny", messages=HELLO)
        assert refused.value.response.headers["Retry-After"] == "1"
    finally:
        serving.engine.resume().result(180)
    assert len((await running).choices) == 64
    sessions = serving.endpoint.sessions
    others = [sessions.get_or_create(f"many-{index}") for index in range(256 - _own(serving))]
    crowded = AsyncOpenAI(base_url=f"{serving.url}/sessions/one-more/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.RateLimitError, match="recorded already"):
        await crowded.chat.completions.create(model="tiny", messages=HELLO, max_tokens=1)
    for session in others:
        sessions.forget(session)
    assert (await crowded.chat.completions.create(model="tiny", messages=HELLO, max_tokens=1)).choices


def _own(serving: Serving) -> int:
    """Sessions that other tests have left."""
    return len(serving.endpoint.sessions)


def test_nothing_is_answered_before_there_are_weights(tmp_path: Path) -> None:
    found = Serving(tmp_path, rollout__endpoint__enabled=True)
    try:
        client = OpenAI(base_url=f"{found.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.InternalServerError) as refused:
            client.chat.completions.create(model="tiny", messages=HELLO)
        assert refused.value.status_code == 503
        assert refused.value.code == "not_ready"
        assert found.figure("requests_total", kind="chat", status="503") == 1
        found.swap(0)
        assert client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=1).choices
    finally:
        found.close()


def test_the_endpoint_has_a_key_of_its_own(serving: Serving, tmp_path: Path) -> None:
    security = SecuritySection(
        token_file=write_secret(tmp_path / "token"), endpoint_key_file=write_secret(tmp_path / "key", "right")
    )
    with served_by(serving, security, host="0.0.0.0") as url:
        base = f"http://127.0.0.1:{url.rpartition(':')[2]}/v1"
        for wrong in ("wrong", TOKEN):
            with pytest.raises(openai.AuthenticationError) as refused:
                OpenAI(base_url=base, api_key=wrong).models.list()
            assert refused.value.code == "invalid_api_key"
        assert OpenAI(base_url=base, api_key="right").models.list().data


@pytest.mark.parametrize(
    ("host", "origin", "reason"),
    [
        ("127.0.0.1:8011", None, ""),
        ("localhost:8011", None, ""),
        ("[::1]:8011", None, ""),
        ("10.1.2.3", None, ""),
        ("Node-7:8011", None, ""),
        ("", None, ""),
        ("localhost:8011", "http://localhost:8011", ""),
        ("LOCALHOST:8011", "http://localhost:8011", ""),
        ("127.0.0.1:8011", "https://evil.example", "foreign_origin"),
        ("127.0.0.1:8011", "http://127.0.0.1:3000", "foreign_origin"),
        ("127.0.0.1:8011", "null", "foreign_origin"),
        ("127.0.0.1:8011", "http://[", "foreign_origin"),
        # A name of the page's server that now points to this machine.
        ("evil.example:8011", "http://evil.example:8011", "foreign_host"),
        ("evil.example:8011", None, "foreign_host"),
        ("127.0.0.1.evil.example", None, "foreign_host"),
        ("[", None, "foreign_host"),
    ],
)
def test_foreign_pages_are_told_from_friends(host: str, origin: str | None, reason: str) -> None:
    if not reason:
        check_caller(host, origin, {"node-7"})
        return
    with pytest.raises(ApiError) as refused:
        check_caller(host, origin, {"node-7"})
    assert (refused.value.status, refused.value.reason) == (403, reason)


@pytest.mark.parametrize("headers", [{"Origin": "https://evil.example"}, {"Host": "evil.example"}])
def test_a_web_page_needs_the_key(serving: Serving, tmp_path: Path, headers: dict[str, str]) -> None:
    def status(url: str, key: str) -> int:
        body = {"model": "tiny", "messages": HELLO, "max_tokens": 1}
        sent = {**headers, "Authorization": f"Bearer {key}"}
        return httpx.post(f"{url}/v1/chat/completions", json=body, headers=sent, timeout=240).status_code

    assert status(serving.url, "none") == 403
    key = write_secret(tmp_path / "key", "right")
    with served_by(serving, SecuritySection(endpoint_key_file=key)) as url:
        assert status(url, "wrong") == 401
        assert status(url, "right") == 200


def test_open_addresses_need_a_key(serving: Serving) -> None:
    with pytest.raises(ConfigError, match="refusing to serve"), served_by(serving, SecuritySection(), host="0.0.0.0"):
        pass
    port = int(serving.url.rpartition(":")[2])
    with pytest.raises(PortInUseError), served_by(serving, SecuritySection(), port=port):
        pass


def test_the_way_for_agents_serves_their_sessions_alone(serving: Serving) -> None:
    own = serving.endpoint.server.agents_url
    assert ipaddress.ip_address(own.rpartition(":")[0].removeprefix("http://")).is_loopback
    with pytest.raises(openai.NotFoundError):
        OpenAI(base_url=f"{own}/v1", api_key="none").models.list()
    with pytest.raises(openai.APIStatusError) as over:
        OpenAI(base_url=f"{own}/sessions/unknown/v1", api_key="none").models.list()
    assert over.value.status_code == 410


def test_a_session_that_ends_while_its_call_is_read_takes_it_no_more(serving: Serving) -> None:
    """A late call is answered by no session of the same name and other rules."""
    policy = SamplingPolicy((5,), SamplingParams(max_tokens=20))
    session = serving.run(lambda: _within(lambda: serving.endpoint.sessions.open_training(policy)))
    before = len(serving.endpoint.sessions)
    at = urlsplit(serving.endpoint.server.agents_url)
    body = json.dumps({"model": "tiny", "messages": HELLO, "max_tokens": 1}).encode()
    connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=180)
    reached = threading.Event()
    known = serving.endpoint.sessions.find
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving.endpoint.sessions, "find", lambda name: (reached.set(), known(name))[1])
        connection.putrequest("POST", f"/sessions/{session.name}/v1/chat/completions")
        connection.putheader("Authorization", f"Bearer {session.key}")
        connection.putheader("Content-Length", str(len(body)))
        connection.putheader("Content-Type", "application/json")
        connection.endheaders()
        assert reached.wait(180)
        # In the event loop: after the whole of the call's admission.
        serving.run(lambda: _within(lambda: serving.endpoint.sessions.forget(session)))
    connection.send(body)
    answer = connection.getresponse()
    assert (answer.status, json.loads(answer.read())["error"]["code"]) == (410, "session_over")
    connection.close()
    assert len(serving.endpoint.sessions) == before - 1


async def _within(what: Callable[[], T]) -> T:
    return what()


def test_tls_is_that_of_the_mesh(serving: Serving, tmp_path: Path) -> None:
    ours, foreign = Authority(tmp_path, "ours"), Authority(tmp_path, "foreign")
    cert, key = ours.certify("service")
    with served_by(serving, SecuritySection(tls_cert=cert, tls_key=key)) as url:
        assert url.startswith("https://")
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            urllib.request.urlopen(url.replace("https", "http") + "/v1/models", timeout=5)
        with httpx.Client(verify=_context(ours)) as http:
            client = OpenAI(base_url=f"{url}/v1", api_key="none", http_client=http)
            assert client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=1).choices
    # Where clients' certificates have an authority, clients have to show who they are, as everywhere in the mesh.
    mutual = SecuritySection(tls_cert=cert, tls_key=key, tls_client_ca=ours.pem)
    with served_by(serving, mutual) as url:
        # Not the timeout: a refused client is told.
        refused = (httpx.NetworkError, httpx.ProtocolError)
        for shown in (None, foreign.certify("stranger")):
            with httpx.Client(verify=_context(ours, shown), timeout=180) as http, pytest.raises(refused):
                http.get(f"{url}/v1/models")
        with httpx.Client(verify=_context(ours, ours.certify("client")), timeout=180) as http:
            assert http.get(f"{url}/v1/models").status_code == 200


def _context(trusted: Authority, shown: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=trusted.pem)
    if shown is not None:
        context.load_cert_chain(*shown)
    return context
