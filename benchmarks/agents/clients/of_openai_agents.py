"""OpenAI's Agents SDK, with its model of chat completions."""

from __future__ import annotations

from typing import Any

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from cases import ASK, LOOK_UP, Number, Streamed, Way, lookup, main
from openai import AsyncOpenAI

set_tracing_disabled(True)
_LOOKUP = function_tool(lookup)


def _agent(way: Way, **more: Any) -> Agent:
    client = AsyncOpenAI(base_url=way.base_url, api_key=way.api_key, max_retries=0)
    return Agent("Helper", instructions="Help.", model=OpenAIChatCompletionsModel(way.model, client), **more)


async def chat(way: Way) -> Any:
    return (await Runner.run(_agent(way), ASK)).final_output


async def tools(way: Way) -> Any:
    return (await Runner.run(_agent(way, tools=[_LOOKUP]), LOOK_UP)).final_output


async def structured(way: Way) -> Any:
    return (await Runner.run(_agent(way, tools=[_LOOKUP], output_type=Number), LOOK_UP)).final_output


async def streaming(way: Way) -> Any:
    run = Runner.run_streamed(_agent(way), ASK)
    raw = [event.data async for event in run.stream_events() if event.type == "raw_response_event"]
    return Streamed([event.delta for event in raw if event.type == "response.output_text.delta"])


async def streamed_tools(way: Way) -> Any:
    run = Runner.run_streamed(_agent(way, tools=[_LOOKUP]), LOOK_UP)
    async for _ in run.stream_events():
        pass
    return run.final_output


main(
    ["openai-agents"], chat=chat, tools=tools, structured=structured, streaming=streaming, streamed_tools=streamed_tools
)
