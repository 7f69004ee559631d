"""The examples of docs/agents.md are accepted: its tool, its environment, its parsers and its keys."""

from __future__ import annotations

import re
from pathlib import Path

from rollmesh.generators.agents.tool_call_parsers import PARSERS
from rollmesh.mesh.agent_tools import load_environment, load_tools
from rollmesh.mesh.config.rollout import AgentSection

PAGES = Path(__file__).resolve().parent.parent.parent / "docs"
PAGE = (PAGES / "agents.md").read_text()
TOOL, ENVIRONMENT = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def rows(heading: str) -> list[str]:
    """First columns of the first table after a line, without the header."""
    table = re.search(r"\n\|.*?\n\n", PAGE.partition(heading)[2], re.DOTALL)
    assert table is not None
    return [line.split("|")[1].strip() for line in table[0].strip().splitlines()[2:]]


def test_the_tool_is_one(tmp_path: Path) -> None:
    file = tmp_path / "tools.py"
    file.write_text(TOOL)
    [tool] = load_tools([f"{file}:search"])
    function = tool.schema["function"]
    assert function["description"] == "Searches the archive."
    assert {name: found["type"] for name, found in function["parameters"]["properties"].items()} == {
        "query": "string",
        "limit": "integer",
    }
    assert function["parameters"]["required"] == ["query"]


def test_the_environment_is_one(tmp_path: Path) -> None:
    file = tmp_path / "game.py"
    file.write_text(ENVIRONMENT)
    assert load_environment(f"{file}:Guessing").form == "step"


def test_all_parsers_are_listed() -> None:
    assert sorted(rows("or is set by `parser`")) == sorted(f"`{name}`" for name in PARSERS)


def test_keys_exist() -> None:
    limits = [re.findall(r"`([\w.]+)`", row)[0] for row in rows("## Limits")]
    assert len(limits) == 6
    said = [name for page in PAGES.glob("*.md") for name in re.findall(r"`rollout\.agent\.(\w+)", page.read_text())]
    assert len(said) > 10
    known = set(AgentSection.model_fields)
    assert {name for name in [*limits, *said] if not name.startswith("rollout.")} <= known
