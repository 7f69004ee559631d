"""Agents as users write them: they know the `openai` package, and nothing of Rollmesh."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.request
from typing import Any


def two_turns(task: dict[str, Any], base_url: str, api_key: str, model: str) -> float:
    """Asks twice; plain."""
    from openai import OpenAI

    client = OpenAI(base_url=base_url, api_key=api_key)
    messages = [{"role": "system", "content": "I am an agent."}, *task["messages"]]
    first = client.chat.completions.create(model=model, messages=messages, max_tokens=6, temperature=0.1)
    messages += [first.choices[0].message, {"role": "user", "content": "again"}]
    client.chat.completions.create(model=model, messages=messages, max_tokens=6, temperature=0.1)
    return 0.5 + task["member"]


def rewrites(task: dict[str, Any], base_url: str, api_key: str, model: str) -> float:
    """Sends its answers back as others, five times."""
    from openai import OpenAI

    client = OpenAI(base_url=base_url, api_key=api_key)
    messages = list(task["messages"])
    for _ in range(5):
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=3)
        said = f"I said: {answer.choices[0].message.content}"
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "again"}]
    return 1.0


def grows(task: dict[str, Any], base_url: str, api_key: str, model: str) -> float:
    """Finds another tool on its way."""
    from openai import OpenAI

    client = OpenAI(base_url=base_url, api_key=api_key)
    messages, tools = list(task["messages"]), []
    for name in ("add", "later"):
        tools.append({"type": "function", "function": {"name": name}})
        answer = client.chat.completions.create(model=model, messages=messages, tools=tools, max_tokens=9).choices[0]
        messages += [answer.message, {"role": "tool", "tool_call_id": "x", "content": "5"}]
    return 1.0


async def one_turn(task: dict[str, Any], base_url: str, api_key: str, model: str) -> dict[str, Any]:
    """Asks once and answers by itself; async."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        asked = await client.chat.completions.create(
            model=model, messages=task["messages"], max_tokens=8, stream=True, stream_options={"include_usage": True}
        )
        async for _ in asked:
            pass
    return {"good": 1, "quick": 0.25, "answer": f"truth {task['ground_truth']}"}


async def breaks(task: dict[str, Any], base_url: str, api_key: str, model: str) -> None:
    await one_turn(task, base_url, api_key, model)
    raise KeyError("tool")


async def exits_in_a_task(task: dict[str, Any], base_url: str, api_key: str, model: str) -> None:
    """As clients of some services leave without a key."""

    async def enter() -> None:
        raise SystemExit("no key")

    await asyncio.create_task(enter())


class Odd:
    """Neither a number nor to be shown."""

    def __float__(self) -> float:
        raise RuntimeError("no number")

    def __str__(self) -> str:
        raise RuntimeError("no words")


async def huge(task: dict[str, Any], base_url: str, api_key: str, model: str) -> int:
    await one_turn(task, base_url, api_key, model)
    return 10**400


async def odd(task: dict[str, Any], base_url: str, api_key: str, model: str) -> Odd:
    await one_turn(task, base_url, api_key, model)
    return Odd()


def talks_on(task: dict[str, Any], base_url: str, api_key: str, model: str) -> float:
    """Knows no bounds."""
    from openai import OpenAI

    client = OpenAI(base_url=base_url, api_key=api_key)
    messages = [*task["messages"]]
    while True:
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=40)
        messages += [answer.choices[0].message, {"role": "user", "content": "again"}]


def silent(task: dict[str, Any], base_url: str, api_key: str, model: str) -> float:
    return 1.0


def endless(task: dict[str, Any], base_url: str, api_key: str, model: str) -> None:
    """Continues until it is told that it is over."""
    from openai import OpenAI

    client = OpenAI(base_url=base_url, api_key=api_key)
    while True:
        client.chat.completions.create(model=model, messages=task["messages"], max_tokens=4)
        time.sleep(0.02)


def command() -> None:
    """A process that needs no library; leaves another one behind."""
    task = json.load(sys.stdin)
    behind = subprocess.Popen(["sleep", "600"], start_new_session="--away" in sys.argv)
    body = {"model": os.environ["OPENAI_MODEL"], "messages": task["messages"], "max_tokens": 5}
    asked = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=240) as answer:
        [choice] = json.load(answer)["choices"]
    print("thinking ...")
    print(json.dumps({"reward": 2, "pid": behind.pid, "length": len(choice["message"]["content"])}))


if __name__ == "__main__":
    command()
