"""langchain-openai: the loop of its user's, with its messages and tools."""

from __future__ import annotations

from typing import Any

from cases import ASK, LOOK_UP, Number, Streamed, Way, lookup, main
from langchain_core.messages import AIMessageChunk, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

_LOOKUP = tool(lookup)


def _model(way: Way) -> ChatOpenAI:
    return ChatOpenAI(model=way.model, base_url=way.base_url, api_key=way.api_key, max_retries=0)


def chat(way: Way) -> Any:
    return _model(way).invoke(ASK).content


def tools(way: Way) -> Any:
    model, messages = _model(way).bind_tools([_LOOKUP]), [HumanMessage(LOOK_UP)]
    while True:
        messages.append(message := model.invoke(messages))
        if not message.tool_calls:
            return message.content
        messages += [_LOOKUP.invoke(call) for call in message.tool_calls]


def structured(way: Way) -> Any:
    return _model(way).with_structured_output(Number).invoke(ASK)


def forced(way: Way) -> Any:
    return _model(way).with_structured_output(Number, method="function_calling").invoke(ASK)


def streaming(way: Way) -> Any:
    return Streamed([part.content for part in _model(way).stream(ASK)])


def streamed_tools(way: Way) -> Any:
    model, messages = _model(way).bind_tools([_LOOKUP]), [HumanMessage(LOOK_UP)]
    while True:
        message = AIMessageChunk("")
        for part in model.stream(messages):
            message += part
        messages.append(message)
        if not message.tool_calls:
            return message.content
        messages += [_LOOKUP.invoke(call) for call in message.tool_calls]


main(
    ["langchain-openai"],
    chat=chat,
    tools=tools,
    structured=structured,
    forced=forced,
    streaming=streaming,
    streamed_tools=streamed_tools,
)
