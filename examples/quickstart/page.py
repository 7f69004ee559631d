"""The parts of `docs/quickstart.md`: its commands, and the files that it shows."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "quickstart.md"
# Commands that set up the clone, in which this runs already.
_SETUP = ("make setup", "source ")


def commands() -> list[str]:
    """The commands in their order, without those that set up the clone."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    lines = "".join(blocks).replace("\\\n", "").splitlines()
    return [" ".join(line.split()) for line in lines if not line.startswith(_SETUP)]


def configuration() -> str:
    """The configuration that `rollmesh init` writes there."""
    return _block("yaml")


def reward() -> str:
    """The file `rewards.py`."""
    return _block("python")


def _block(language: str) -> str:
    [block] = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return str(block)
