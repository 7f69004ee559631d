"""The agent: a loop of calls and tools, as for any OpenAI-compatible server."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Adds two whole numbers.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string", "description": "for example 2+3"}},
                "required": ["expression"],
            },
        },
    }
]
TURNS = 3


async def solve(task: dict[str, Any], base_url: str, api_key: str, model: str) -> str:
    """Answers a question; the run's reward function scores the return value."""
    messages: list[Any] = list(task["messages"])
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=connections())
    for _ in range(TURNS):
        answer = await client.chat.completions.create(model=model, messages=messages, tools=TOOLS, max_tokens=24)
        said = answer.choices[0].message
        if not said.tool_calls:
            return said.content or ""
        messages.append(said)
        for call in said.tool_calls:
            content = calculate(call.function.arguments if call.type == "function" else "")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return ""


@cache
def connections() -> DefaultAsyncHttpxClient:
    """The connections of all episodes: a client of its own for each would take longer than the rest of the agent."""
    return DefaultAsyncHttpxClient()


def calculate(arguments: str) -> str:
    """The tool; the model sees its errors."""
    try:
        left, right = json.loads(arguments)["expression"].split("+")
        return str(int(left) + int(right))
    except (KeyError, ValueError, TypeError, AttributeError):
        return "error"
