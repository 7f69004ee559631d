"""Environments of a user's module, as they are looked at before the first episode."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmesh.mesh.agent_tools import load_environment
from rollmesh.mesh.errors import ConfigError

_MODULE = """
from __future__ import annotations
import collections

open_now = 0


class Game:
    def __init__(self):
        global open_now
        open_now += 1

    def reset(self): ...
    def step(self, action: str) -> HINT: ...

    def close(self):
        global open_now
        open_now -= 1


def make():
    return Game()


def check():
    assert open_now == 0, open_now
    return None
"""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    return tmp_path / "game.py"


def test_an_instance_that_was_only_looked_at_is_closed(module: Path) -> None:
    """It may hold a browser, or a container."""
    module.write_text(_MODULE.replace("HINT", "tuple[str, float, bool]"))
    assert load_environment(f"{module}:make").form == "step"
    with pytest.raises(ConfigError, match="no method `reset`"):
        load_environment(f"{module}:check")


@pytest.mark.parametrize("hint", ["Nobody", "collections.Nobody", "'int' | 1", "dict["])
def test_hints_that_no_one_can_resolve_are_no_tool(hint: str, module: Path) -> None:
    """They may be meant for type checkers alone."""
    written = repr(hint) if hint == "dict[" else hint
    module.write_text(_MODULE.replace("HINT", written))
    assert load_environment(f"{module}:Game").form == "step"
