"""Runs tests in the program's own process, where they have to hand it functions and objects of theirs.

Input: `{"setup", "parts", "entry_point", "passwords": [...]}`. Output: the password of each case that has passed, a row
each. A program that ends the process, or prints, shows none; one that searches the memory of its process finds them.
"""

from __future__ import annotations

import json
import sys

from loading import load_solution, private_channel, put
from runner import PROGRAM, BrokenError, Runner


def main() -> None:
    """Reads, loads, runs."""
    request = json.loads(sys.stdin.buffer.read())
    passwords = request.pop("passwords")
    channel = private_channel()
    module = load_solution("solution.py")
    for name in PROGRAM:
        sys.modules[name] = module

    def passes(number: int, _name: str) -> None:
        if number < len(passwords):
            put(channel, passwords[number] + "\n")

    runner = Runner(request, lambda name: getattr(module, name), passes)
    try:
        runner.run()
    except BrokenError as error:
        print(error, file=sys.stderr)  # noqa: T201
    for case in runner.cases:
        if not case["passed"]:
            print(f"{case['name']}: {case['text']}", file=sys.stderr)  # noqa: T201
