"""LiteLLM: the loop of its user's. It keeps thoughts apart from contents."""

from __future__ import annotations

import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks a server for prices

import litellm
from cases import ASK, LOOK_UP, TOOL, Number, Streamed, Way, lookup, main


def _ask(way: Way, messages: list[Any], **more: Any) -> Any:
    place = {"model": f"openai/{way.model}", "api_base": way.base_url, "api_key": way.api_key}
    return litellm.completion(**place, messages=messages, max_retries=0, **more)


def _said(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def chat(way: Way) -> Any:
    return _ask(way, _said(ASK)).choices[0].message.content


def tools(way: Way) -> Any:
    messages = _said(LOOK_UP)
    while True:
        message = _ask(way, messages, tools=[TOOL]).choices[0].message
        messages.append(message.model_dump())
        if not message.tool_calls:
            return message.content
        messages += _results(message.tool_calls)


def structured(way: Way) -> Any:
    said = _ask(way, _said(ASK), response_format=Number).choices[0].message.content
    return Number.model_validate_json(said)


def streaming(way: Way) -> Any:
    return Streamed([part.choices[0].delta.content or "" for part in _ask(way, _said(ASK), stream=True)])


def streamed_tools(way: Way) -> Any:
    messages = _said(LOOK_UP)
    while True:
        parts = list(_ask(way, messages, tools=[TOOL], stream=True))
        message = litellm.stream_chunk_builder(parts, messages=messages).choices[0].message
        messages.append(message.model_dump())
        if not message.tool_calls:
            return message.content
        messages += _results(message.tool_calls)


def _results(calls: Any) -> list[Any]:
    return [
        {"role": "tool", "tool_call_id": call.id, "content": lookup(**json.loads(call.function.arguments))}
        for call in calls
    ]


main(["litellm"], chat=chat, tools=tools, structured=structured, streaming=streaming, streamed_tools=streamed_tools)
