"""Where the environments of the real inference engines are, and what becomes of a test whose engine is missing."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from tests.repository import REPOSITORY

# Another place for an environment than that of `make vllm` and `make sglang`: its interpreter.
_VARIABLES = {"vllm": "ROLLMESH_VLLM_PYTHON", "sglang": "ROLLMESH_SGLANG_PYTHON"}


def python(engine: str) -> Path:
    """The interpreter of an engine's environment, whether it exists or not."""
    return Path(os.environ.get(_VARIABLES[engine]) or REPOSITORY / f".venv-{engine}" / "bin" / "python")


def require(engine: str) -> None:
    """Ends the test where the engine has no environment here."""
    folder = python(engine).parents[1]
    if next(folder.glob(f"lib/python3*/site-packages/{engine}/__init__.py"), None) is None:
        _without(f"{engine} is not installed in {folder}: make {engine}")


def require_inside(engine: str) -> None:
    """Ends the test where the engine cannot be imported by the interpreter that runs the test."""
    if importlib.util.find_spec(engine) is None:
        _without(
            f"{engine} is not installed in {sys.prefix}, which runs this test: make {engine}, then "
            f"{python(engine)} -m pytest"
        )


def _without(reason: str) -> None:
    if os.environ.get("ROLLMESH_REQUIRE_ENGINES") == "1":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)
