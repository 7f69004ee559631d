"""The `openai` package: a loop of its user's."""

from __future__ import annotations

import json
from typing import Any

from cases import ASK, LOOK_UP, TOOL, Number, Streamed, Way, lookup, main
from openai import OpenAI


def _client(way: Way) -> OpenAI:
    return OpenAI(base_url=way.base_url, api_key=way.api_key, max_retries=0)


def _said(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def chat(way: Way) -> Any:
    return _client(way).chat.completions.create(model=way.model, messages=_said(ASK)).choices[0].message.content


def tools(way: Way) -> Any:
    client, messages = _client(way), _said(LOOK_UP)
    while True:
        message = client.chat.completions.create(model=way.model, messages=messages, tools=[TOOL]).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        messages += _results(message.tool_calls)


def structured(way: Way) -> Any:
    asked = _client(way).chat.completions.parse(model=way.model, messages=_said(ASK), response_format=Number)
    return asked.choices[0].message.parsed


def streaming(way: Way) -> Any:
    asked = _client(way).chat.completions.create(model=way.model, messages=_said(ASK), stream=True)
    return Streamed([part.choices[0].delta.content or "" for part in asked if part.choices])


def streamed_tools(way: Way) -> Any:
    client, messages = _client(way), _said(LOOK_UP)
    while True:
        with client.chat.completions.stream(
            model=way.model, messages=messages, tools=[TOOL], stream_options={"include_usage": True}
        ) as stream:
            message = stream.get_final_completion().choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        messages += _results(message.tool_calls)


def _results(calls: Any) -> list[Any]:
    return [
        {"role": "tool", "tool_call_id": call.id, "content": lookup(**json.loads(call.function.arguments))}
        for call in calls
    ]


main(["openai"], chat=chat, tools=tools, structured=structured, streaming=streaming, streamed_tools=streamed_tools)
