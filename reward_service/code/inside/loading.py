"""Loads the program as the module `solution`, and keeps what is printed apart from what is answered."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any


def private_channel() -> int:
    """A descriptor of standard output that no print reaches: what is printed goes to standard error."""
    channel = os.dup(1)
    os.dup2(2, 1)
    return channel


def put(channel: int, text: str) -> None:
    """Writes a text."""
    data = text.encode()
    while data:
        data = data[os.write(channel, data) :]


def load_solution(path: str) -> Any:
    """The program as a module; raises whatever it raises."""
    module = ModuleType("solution")
    sys.modules["solution"] = module
    with open(path, "rb") as file:
        exec(compile(file.read(), path, "exec", dont_inherit=True), module.__dict__)  # noqa: S102
    return module
