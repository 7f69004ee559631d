"""Calls one function of the program with arguments from standard input, and puts its result out as JSON.

Input: `{"function": name, "arguments": [...]}`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Set
from typing import Any

from loading import load_solution, private_channel, put


def main() -> None:
    """Reads, calls, answers."""
    request = json.loads(sys.stdin.buffer.read())
    channel = private_channel()
    module = load_solution("solution.py")
    owner = module.Solution() if hasattr(module, "Solution") else module
    function = getattr(owner, request["function"], None) or getattr(module, request["function"])
    result = function(*map(_argument, request["arguments"]))
    put(channel, json.dumps(_plain(result)))


def _argument(value: Any) -> Any:
    """JSON has texts for names of objects; those that are all integers were integers."""
    if isinstance(value, dict) and value and all(name.lstrip("-").isdecimal() for name in value):
        return {int(name): entry for name, entry in value.items()}
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name if isinstance(name, str) else str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, Set):
        return sorted(map(_plain, value), key=repr)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return [_plain(entry) for entry in value]


if __name__ == "__main__":
    main()
