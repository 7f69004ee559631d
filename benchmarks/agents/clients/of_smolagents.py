"""Both agents of smolagents: one writes code, the other one calls tools, and has to."""

from __future__ import annotations

from typing import Any

from cases import ASK, LOOK_UP, Streamed, Way, lookup, main
from smolagents import CodeAgent, LogLevel, OpenAIModel, ToolCallingAgent, tool
from smolagents.models import ChatMessage, MessageRole

_LOOKUP = tool(lookup)
_QUIET = {"verbosity_level": LogLevel.OFF}


def _model(way: Way) -> OpenAIModel:
    return OpenAIModel(way.model, api_base=way.base_url, api_key=way.api_key)


def chat(way: Way) -> Any:
    return _model(way).generate([ChatMessage(MessageRole.USER, ASK)]).content


def streaming(way: Way) -> Any:
    return Streamed([part.content or "" for part in _model(way).generate_stream([ChatMessage(MessageRole.USER, ASK)])])


def tools(way: Way) -> Any:
    return ToolCallingAgent([_LOOKUP], _model(way), **_QUIET).run(LOOK_UP)


def streamed_tools(way: Way) -> Any:
    return ToolCallingAgent([_LOOKUP], _model(way), stream_outputs=True, **_QUIET).run(LOOK_UP)


def code(way: Way) -> Any:
    return CodeAgent([_LOOKUP], _model(way), **_QUIET).run(f"Write in code. {LOOK_UP}")


def streamed_code(way: Way) -> Any:
    return CodeAgent([_LOOKUP], _model(way), stream_outputs=True, **_QUIET).run(f"Write in code. {LOOK_UP}")


def structured(way: Way) -> Any:
    agent = CodeAgent([_LOOKUP], _model(way), use_structured_outputs_internally=True, **_QUIET)
    return agent.run(f"Write in code. {LOOK_UP}")


main(
    ["smolagents"],
    chat=chat,
    tools=tools,
    code=code,
    structured=structured,
    streaming=streaming,
    streamed_tools=streamed_tools,
    streamed_code=streamed_code,
)
