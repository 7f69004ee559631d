"""Pydantic AI: an output type is a tool that has to be called, or the form of the response."""

from __future__ import annotations

from typing import Any

from cases import ASK, LOOK_UP, Number, Streamed, Way, lookup, main
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


def _agent(way: Way, **more: Any) -> Agent[None, Any]:
    return Agent(
        OpenAIChatModel(way.model, provider=OpenAIProvider(base_url=way.base_url, api_key=way.api_key)), **more
    )


async def chat(way: Way) -> Any:
    return (await _agent(way).run(ASK)).output


async def tools(way: Way) -> Any:
    return (await _agent(way, tools=[lookup]).run(LOOK_UP)).output


async def structured(way: Way) -> Any:
    return (await _agent(way, tools=[lookup], output_type=Number).run(LOOK_UP)).output


async def native(way: Way) -> Any:
    return (await _agent(way, tools=[lookup], output_type=NativeOutput(Number)).run(LOOK_UP)).output


async def streaming(way: Way) -> Any:
    async with _agent(way).run_stream(ASK) as run:
        return Streamed([piece async for piece in run.stream_text(delta=True, debounce_by=None)])


async def streamed_tools(way: Way) -> Any:
    async with _agent(way, tools=[lookup]).run_stream(LOOK_UP) as run:
        return await run.get_output()


main(
    ["pydantic-ai-slim"],
    chat=chat,
    tools=tools,
    structured=structured,
    native=native,
    streaming=streaming,
    streamed_tools=streamed_tools,
)
