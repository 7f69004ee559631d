"""Calls of tools that a client requires: the model writes one, whatever it would have said."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import openai
import pytest
from openai import OpenAI

from rollmesh.generators.openai_server.requests import ChatRequest, parse
from tests.generators.openai_server.test_sessions import ASK, IDS, ask, client_of, trained
from tests.generators.openai_server.world import Serving

# The world's model says anything after the result of a tool.
DONE: list[Any] = [ASK, {"role": "assistant", "content": "hm"}, {"role": "tool", "tool_call_id": "x", "content": "5"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"properties": {"a": {"enum": [1]}}, "required": ["a"]}},
    },
    {"type": "function", "function": {"name": "end"}},
]
NAMED: Any = {"type": "function", "function": {"name": "end"}}


@pytest.fixture
def client(serving: Serving) -> OpenAI:
    return OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0)


def required(client: OpenAI, seed: int = 0, **more: Any) -> Any:
    asked = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "seed": seed + 1} | more
    [choice] = client.chat.completions.create(model="tiny", messages=DONE, max_tokens=150, **asked).choices
    return choice


@pytest.mark.parametrize("seed", range(4))
def test_a_required_call_is_made(client: OpenAI, seed: int) -> None:
    choice = required(client, seed)
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name in ("add", "end")
    assert arguments == ({} if call.function.name == "end" else {"a": 1})
    [named] = required(client, seed, tool_choice=NAMED, parallel_tool_calls=None).message.tool_calls
    assert (named.function.name, named.function.arguments) == ("end", "{}")


def test_a_required_call_comes_in_streams_and_beside_calls_that_are_free(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model="tiny", messages=DONE, tools=TOOLS, tool_choice=NAMED, max_tokens=100
    ) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.message.tool_calls is not None
    assert final.message.tool_calls[0].function.name == "end"
    assert required(client, tool_choice="auto").message.tool_calls is None


def test_a_required_call_is_trained_with_the_log_probs_of_what_was_allowed(serving: Serving) -> None:
    """Tokens that the grammar leaves no choice of have log-prob 0, as they were drawn."""
    session = trained(serving, "<system>", max_tokens=390)
    client = client_of(serving, session)
    first = ask(client, [ASK], tools=TOOLS[1:])
    result = {"role": "tool", "tool_call_id": first.message.tool_calls[0].id, "content": "5"}
    forced = client.chat.completions.create(
        model="tiny", messages=[ASK, first.message, result], tools=TOOLS, tool_choice=NAMED, extra_body=IDS
    ).choices[0]
    assert forced.message.tool_calls is not None
    chain = session.record.chain()
    assert len(chain) == 2, "other tools leave the conversation whole"
    log_probs = chain[-1].sampled.log_probs
    assert chain[-1].sampled.response_mask.all()
    assert np.isclose(log_probs, 0).sum() > len(log_probs) / 2
    assert (log_probs <= 1e-6).all()
    back = {"role": "tool", "tool_call_id": forced.message.tool_calls[0].id, "content": "done"}
    ask(client, [ASK, first.message, result, forced.message, back])
    assert len(session.record.chain()) == 3
    serving.endpoint.sessions.forget(session)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"tool_choice": "required"}, "tool_choice asks for a call; tools in this request: none"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "no"}}, "tools": TOOLS},
            "asks for the function 'no'; tools in this request: add, end",
        ),
        ({"tool_choice": "any", "tools": TOOLS}, "is `none`, `auto`, `required`, or a function by its name"),
        ({"tool_choice": {"type": "custom"}, "tools": TOOLS}, "or a function by its name"),
        (
            {"tool_choice": "required", "tools": [{"function": {"name": "f", "parameters": {"type": "odd"}}}]},
            "the schemas of the tools have no grammar",
        ),
    ],
)
def test_a_choice_that_cannot_be_honoured_is_refused_by_name(client: OpenAI, asked: Any, said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said) as refused:
        client.chat.completions.create(model="tiny", messages=[ASK], **asked)
    assert refused.value.param in ("tool_choice", "tools")


def test_what_the_engine_or_the_parser_cannot_is_refused_by_name(
    serving: Serving, client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving.endpoint.completions.codec, "_parser", "pythonic")
    with pytest.raises(openai.BadRequestError, match=r"no grammar for the form of calls .*rollout\.agent\.parser"):
        required(client)
    monkeypatch.setattr(type(serving.engine), "takes_grammars", False)
    with pytest.raises(openai.BadRequestError, match="the engine hf forces no calls"):
        required(client)
    # The remedy of both.
    assert required(client, tool_choice="none").message.content


def test_a_choice_in_words() -> None:
    def of(choice: Any, **more: Any) -> ChatRequest:
        body = {"model": "m", "messages": [{"role": "user", "content": "?"}], "tools": TOOLS, "tool_choice": choice}
        request = parse("chat", body | more, training=True)
        assert isinstance(request, ChatRequest)
        return request

    assert of("required").forced_tools == TOOLS
    assert of(NAMED).forced_tools == TOOLS[1:]
    for choice in (None, "auto", "none"):
        assert of(choice).forced_tools == []
    assert (of("none").callable_tools, of("required").callable_tools) == ([], TOOLS)
    assert of("required").many_calls
    assert not of(NAMED).many_calls
    assert not of("required", parallel_tool_calls=False).many_calls
