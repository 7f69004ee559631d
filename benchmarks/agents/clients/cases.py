"""The cases of all frameworks: questions, a tool, and the form of what is read and printed.

A program reads `{"model": ..., "cases": {NAME: {"base_url": ..., "api_key": ...}}}` from standard input. Its last line
is `{"packages": {NAME: VERSION}, "cases": {NAME: {"answer": ...} or {"error": ...}}}`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from pydantic import BaseModel

ASK = "Say the number at once."
LOOK_UP = "Look up 'first', then look up the result of that. Which number is it?"
_KNOWN = {"first": "417", "417": "923"}


def lookup(key: str) -> str:
    """Looks a key up.

    Args:
        key: to look up.
    """
    return _KNOWN.get(key, "unknown")


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Looks a key up.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}


class Number(BaseModel):
    """The answer as an object."""

    number: int


@dataclass(frozen=True, slots=True)
class Way:
    """The way to the endpoint."""

    base_url: str
    api_key: str
    model: str


@dataclass(frozen=True, slots=True)
class Streamed:
    """A text that came in pieces."""

    pieces: list[str]


def main(packages: Iterable[str], **cases: Callable[[Way], Any]) -> None:
    """Runs the cases that are asked for.

    Args:
        packages: whose versions are named.
        cases: functions, plain or async; each returns its answer.
    """
    asked = json.load(sys.stdin)
    os.environ |= {"OTEL_SDK_DISABLED": "true", "LANGSMITH_TRACING": "false"}
    found = {}
    for name, way in asked["cases"].items():
        try:
            answer = cases[name](Way(**way, model=asked["model"]))
            answer = asyncio.run(answer) if inspect.iscoroutine(answer) else answer
            if isinstance(answer, Streamed):
                found[name] = {"answer": "".join(answer.pieces), "pieces": sum(map(bool, answer.pieces))}
            else:
                found[name] = {"answer": answer.number if isinstance(answer, Number) else answer}
        except Exception as error:  # noqa: BLE001  # each framework has its own
            traceback.print_exc()
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    versions = {name: metadata.version(name) for name in packages}
    print(json.dumps({"packages": versions, "cases": found}), flush=True)
