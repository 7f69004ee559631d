"""Runs tests of a program that is elsewhere; see `link.py`.

Input: `{"setup", "parts", "entry_point", "ops": [...], "results": [...]}`, with the operations of the last run and
their results. Output: `{"ops", "pending", "cases": [{"name", "passed", "text"}], "reason", "broken", "too_many"}`.
"""

from __future__ import annotations

import json
import sys
from types import ModuleType
from typing import Any

from link import EndedError, Link, TooManyError
from loading import private_channel, put
from runner import PROGRAM, BrokenError, Runner


class _Program(ModuleType):
    """The module from which the tests import."""

    def __init__(self, name: str, link: Link) -> None:
        super().__init__(name)
        self.__dict__["_link"] = link

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _lookup(self.__dict__["_link"], name)


def _lookup(link: Link, name: str) -> Any:
    """A name of the program; a program that has ended has none."""
    try:
        return link.ask("get", name)
    except EndedError as error:
        raise AttributeError(str(error)) from error


def main() -> None:
    """Reads, runs, answers."""
    request = json.loads(sys.stdin.buffer.read())
    channel = private_channel()
    link = Link(request["ops"], request["results"])
    for name in PROGRAM:
        sys.modules[name] = _Program(name, link)

    def swallow(error: BaseException) -> None:
        if not link.pending or isinstance(error, TooManyError | BrokenError):
            raise error

    runner, broken, too_many = None, "", False
    try:
        runner = Runner(
            request, lambda name: _lookup(link, name), lambda *_: None, swallow=swallow, stops=(TooManyError,)
        )
        runner.run()
    except TooManyError:
        too_many = True
    except BrokenError as error:
        broken = str(error)
    answer = {
        "ops": link.issued,
        "pending": link.pending,
        "cases": runner.cases if runner is not None else [],
        "reason": link.reason,
        "broken": broken,
        "too_many": too_many,
    }
    put(channel, json.dumps(answer))
