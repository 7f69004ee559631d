"""Whatever a client sends, the event loop, which renews leases, runs on: what is large runs in threads."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from openai import OpenAI

from rollmesh.generators.openai_server import http_server
from rollmesh.generators.openai_server.conversations.turn_tree import TurnTree
from rollmesh.generators.openai_server.incremental_text import IncrementalDetokenizer
from rollmesh.generators.openai_server.response_format import ResponseFormatter
from rollmesh.generators.openai_server.worker_threads import Workers
from tests.generators.openai_server.world import TOOL, Serving

T = TypeVar("T")


def test_the_endpoint_answers_others_while_it_goes_through_what_is_large(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step of a call waits until the event loop has answered another client: it would wait in vain on the loop."""
    seen: set[str] = set()

    def beside_others(name: str, step: Callable[..., T]) -> Callable[..., T]:
        def stepping(*args: Any, **more: Any) -> T:
            with urllib.request.urlopen(f"{serving.url}/v1/models", timeout=180) as answer:
                assert answer.status == 200
            seen.add(name)
            return step(*args, **more)

        return stepping

    codec = serving.endpoint.completions.codec
    steps: list[tuple[Any, str]] = [
        (http_server, "parse"), (ResponseFormatter, "response"), (TurnTree, "to_json"), (IncrementalDetokenizer, "add"),
        *((codec, name) for name in ("check_tools", "prompt", "continuation", "encode", "encode_more")),
        *((codec, name) for name in ("decode", "answer")),
    ]  # fmt: skip
    for owner, name in steps:
        monkeypatch.setattr(owner, name, beside_others(name, getattr(owner, name)))
    # Nothing of this model is long.
    monkeypatch.setattr("rollmesh.generators.openai_server.worker_threads._LITTLE", 0, raising=False)
    client = OpenAI(base_url=f"{serving.url}/sessions/large/v1", api_key="none", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "the"}]
    tools: Any = [TOOL]
    said = client.chat.completions.create(model="tiny", messages=messages, tools=tools).choices[0].message
    messages += [said, {"role": "tool", "tool_call_id": "c", "content": "5"}]
    assert client.chat.completions.create(model="tiny", messages=messages, tools=tools, max_tokens=3).choices
    text = client.completions.create(model="tiny", prompt="the", max_tokens=3).choices[0].text
    assert list(client.completions.create(model="tiny", prompt=f"the{text} fox", max_tokens=3, stream=True))
    assert client.get(f"{serving.url}/sessions/large", cast_to=object)
    assert seen == {name for _, name in steps}


async def test_what_is_large_runs_in_a_thread_and_what_is_small_at_once() -> None:
    workers = Workers(1, "work")
    try:
        assert await workers.run(1, threading.get_ident) == threading.get_ident()
        assert await workers.run(1 << 20, threading.get_ident) != threading.get_ident()
        with pytest.raises(ValueError, match="x"):
            await workers.run(1 << 20, int, "x")
    finally:
        workers.close()


def test_bytes_that_are_no_character_for_long_are_not_decoded_over_and_over() -> None:
    decoded = 0

    def decode(ids: Any) -> str:
        nonlocal decoded
        decoded += len(ids)
        return "".join("\N{REPLACEMENT CHARACTER}" if token else "x" for token in ids)

    growing, count = IncrementalDetokenizer(decode, ()), 5000
    assert not any(growing.add([1]) for _ in range(count))
    assert len("".join(growing.add([0]) for _ in range(count))) == 2 * count
    assert decoded < 20 * count
