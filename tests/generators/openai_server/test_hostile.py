"""Bodies, keys and texts as no client library writes them."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from rollmesh.generators.openai_server import http_server as endpoint_server
from rollmesh.generators.openai_server.errors import ApiError
from rollmesh.generators.openai_server.http_server import EndpointServer
from rollmesh.generators.openai_server.incremental_text import IncrementalDetokenizer, whole_text
from rollmesh.generators.openai_server.response_format import event
from rollmesh.generators.openai_server.template_codec import TemplateChatCodec
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.runtime import open_files
from tests.generators.openai_server.world import TOOL, Serving, another_server, chat_tokenizer
from tests.secrets_here import write_secret

HALF = "half \ud800 a pair"


def post(serving: Serving, body: bytes, *, path: str = "/v1/chat/completions", **headers: str) -> tuple[int, Any]:
    at = urlsplit(serving.url)
    connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=240)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def asking(**fields: Any) -> bytes:
    body = {"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": "the fox"}], **fields}
    return json.dumps(body).encode()


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"{", {}),
        (b"[" * 10_000, {}),
        (b'{"model": ' + b"9" * 5000 + b"}", {}),
        (b"\xff\xfe", {}),
        (b"", {}),
        (b'"text"', {}),
    ],
)
def test_what_is_no_request_is_refused_in_the_right_form(
    serving: Serving, body: bytes, headers: dict[str, str]
) -> None:
    status, answer = post(serving, body, **headers)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (asking(), {"Content-Type": "application/json; charset=punycode"}, 415),
        # A context of 400 tokens, at 32 bytes each, and a MiB of tools and the like.
        (b" " * ((1 << 20) + 32 * 400 + 1), {}, 413),
        # Small, and long to parse.
        (b"[" + b"[]," * 10_000 + b"1]", {}, 413),
        (asking(), {"Content-Type": "text/plain"}, 415),
        (asking(), {"Content-Type": "application/x-www-form-urlencoded"}, 415),
        (gzip.compress(asking()), {"Content-Encoding": "gzip"}, 415),
    ],
    ids=["punycode", "bytes", "values", "text", "form", "packed"],
)
def test_what_is_not_worth_parsing_is_refused_unparsed(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, body: bytes, headers: dict[str, str], status: int
) -> None:
    parsed: list[object] = []
    monkeypatch.setattr(
        "rollmesh.generators.openai_server.http_server.parse", lambda *args, **more: parsed.append(args)
    )
    found, answer = post(serving, body, **headers)
    assert (found, answer["error"]["type"]) == (status, "invalid_request_error")
    assert not parsed


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "assistant", "content": "a", "tool_calls": 5}]}, "messages[0].tool_calls"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [TOOL, {"type": "function", "function": 5}]}, "tools[1]"),
        ({"tools": [{"type": "function", "function": {"name": 3}}]}, "tools[0]"),
    ],
)
def test_calls_and_tools_that_are_none_are_named(serving: Serving, fields: dict[str, Any], param: str) -> None:
    status, answer = post(serving, asking(**fields))
    assert (status, answer["error"]["param"]) == (400, param)


def test_arguments_nested_without_end_are_text(serving: Serving) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "[" * 10_000}}
    status, answer = post(serving, asking(messages=[{"role": "assistant", "content": "", "tool_calls": [call]}]))
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


def test_schemas_of_any_kind_type_the_arguments(serving: Serving) -> None:
    """A value that came as text stays text where the schema says so, or says nothing; all else is JSON, where it can
    be.
    """
    codec = TemplateChatCodec(serving.tokenizer, end_ids=frozenset(), parser="qwen3_coder")
    kinds: dict[str, Any] = {
        "number": {"type": "integer"},
        "text": {"type": "string"},
        "either": {"type": ["string", "null"]},
        "one_of": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "one_of_text": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "anything": True,
        "broken": {"type": "integer"},
        "deep": {"type": "array"},
    }
    given = dict.fromkeys(kinds, "7") | {"broken": "seven", "deep": "[" * 100_000, "unknown": "7"}
    body = "".join(f"<parameter={name}>{value}</parameter>" for name, value in given.items())
    ids = serving.tokenizer.encode(f"<tool_call><function=f>{body}</function></tool_call>")
    for properties in (kinds, {"number": kinds["number"]}, 5):
        tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
        [(name, arguments)] = codec.answer(ids, "", [tool]).calls
        assert name == "f"
        typed = {"number": 7} if properties != 5 else {}
        typed |= {"one_of": 7} if properties is kinds else {}
        assert arguments == {**given, **typed}


def test_halves_of_characters_are_answered(serving: Serving) -> None:
    status, answer = post(serving, asking(messages=[{"role": "user", "content": HALF}]))
    assert status == 200, answer
    body = json.dumps({"model": "tiny", "max_tokens": 3, "prompt": HALF}).encode()
    status, answer = post(serving, body, path="/v1/completions")
    assert status == 200, answer
    assert json.loads(event({"text": HALF}).removeprefix(b"data: ")) == {"text": HALF}


@pytest.mark.parametrize("wrong", ["range(10**19)", "1/0", "[][0].a.b", "'a' * 10**18", "2 ** 'a'", "tools.append(1)"])
def test_what_a_chat_template_fails_of_is_told(wrong: str) -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = f"{{% for each in [{wrong}] %}}{{{{ each }}}}{{% endfor %}}"
    codec = TemplateChatCodec(tokenizer, end_ids=frozenset())
    with pytest.raises(ApiError, match="the chat template refuses a conversation") as error:
        codec.prompt([{"role": "user", "content": "the fox"}], [], 100)
    assert error.value.status == 400


def test_a_name_of_a_tool_may_hold_half_a_character(serving: Serving) -> None:
    tools = [{"type": "function", "function": {"name": "f\ud800", "parameters": {"type": "object", "properties": {}}}}]
    status, answer = post(serving, asking(tools=tools))
    assert status == 200, answer


@pytest.mark.parametrize("cut", range(1, 5))
def test_stop_strings_and_characters_over_several_tokens(serving: Serving, cut: int) -> None:
    """However the tokens come, the pieces are the text before the first stop string, whole characters each."""
    text = "the 🦊 quick — STOquick é STOP here 🦊 STOP"
    codec = TemplateChatCodec(serving.tokenizer, end_ids=frozenset())
    ids = [token for character in text for token in codec.encode_more(character, 99)]
    assert len(ids) > len(text), "some characters have several tokens"
    for stops in ((), ("STOP",), ("STOP here", " é STOP"), ("quick — S",)):
        growing = IncrementalDetokenizer(codec.decode, stops)
        pieces = [growing.add(ids[at : at + cut]) for at in range(0, len(ids), cut)]
        whole = whole_text(codec.decode(ids), stops)
        assert whole.startswith("".join(pieces))
        assert not any("\ufffd" in piece for piece in pieces)
        if stops:
            assert "".join(pieces) == whole
        assert len("".join(pieces)) >= len(whole) - max((len(stop) for stop in stops), default=1)


@contextmanager
def connected(server: EndpointServer, sent: bytes = b"") -> Iterator[socket.socket]:
    at = urlsplit(server.url)
    with socket.create_connection((at.hostname, at.port), timeout=240) as client:
        client.sendall(sent)
        yield client


def is_closed(client: socket.socket) -> bool:
    """Waits for it; what was answered is read before."""
    try:
        while client.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def test_connections_end_that_ask_for_nothing(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_server, "_IDLE_S", 1.0)
    with another_server(serving, SecuritySection()) as server, ExitStack() as clients:
        for sent in (b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n", b"GET /v1/models HTTP/1.1\r\n\r\n"):
            assert is_closed(clients.enter_context(connected(server, sent)))


def test_a_flood_of_connections_ends_none_that_is_answered(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose request takes long to come, too, once its caller was let in; who has no key is let into nothing."""
    monkeypatch.setattr(open_files, "MOST", open_files.MOST._replace(requests=3))
    body = asking()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\nExpect: 100-continue\r\n"
    ).encode()
    key = write_secret(serving.folder / "flooded.key", "the key of the endpoint")
    with another_server(serving, SecuritySection(endpoint_key_file=key)) as server, ExitStack() as clients:
        authorized = head + b"Authorization: Bearer the key of the endpoint\r\n\r\n"
        slow = clients.enter_context(connected(server, authorized))
        assert slow.recv(1 << 10).startswith(b"HTTP/1.1 100")
        strangers = [clients.enter_context(connected(server, sent)) for sent in (b"", head + b"\r\n") * 4]
        assert all(map(is_closed, strangers[:-2]))
        slow.sendall(body)
        assert slow.recv(1 << 10).startswith(b"HTTP/1.1 200")
