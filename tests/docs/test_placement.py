"""The page about placement: its table is what plans find, and its keys and phases are there."""

from __future__ import annotations

import re

import pytest

from rollmesh.planning.topologies.docs_reference import DEVICES, HEADER, MODELS, NONE, row
from rollmesh.report.turns import PHASES
from tests.config_keys import is_key
from tests.repository import REPOSITORY

PAGE = (REPOSITORY / "docs" / "placement.md").read_text(encoding="utf-8")
TABLE = PAGE.partition("<!-- placements: begin -->")[2].partition("<!-- placements: end -->")[0]
ROWS = [tuple(line.split(" | ")) for line in re.findall(r"^\| (.*) \|$", TABLE, re.MULTILINE)]
ARCHITECTURES = REPOSITORY / "tests" / "rollmesh" / "planning" / "architectures"


def test_the_table_has_every_model_on_every_number_of_devices() -> None:
    header, _, *rows = ROWS
    assert header == HEADER
    assert [cells[:2] for cells in rows] == [(name, str(count)) for name in MODELS.values() for count in DEVICES]
    only_in_turns = [cells[:2] for cells in rows if cells[2] == NONE != cells[3]]
    assert ("Qwen2.5-7B", "2") in only_in_turns
    assert not [cells for cells in rows if cells[3] == NONE != cells[2]], "the page says that turns need less"


@pytest.mark.parametrize(
    ("model", "devices"), [pytest.param("qwen2.5-0.5b", 1, marks=pytest.mark.exhaustive), ("qwen2.5-7b", 2)]
)
def test_a_row_is_what_the_plan_finds(model: str, devices: int) -> None:
    assert row(ARCHITECTURES, model, devices) in ROWS


def test_keys_and_phases_are_there() -> None:
    keys = set(re.findall(r"`(placement\.[a-z_.]+|rollout\.[a-z_.]+|buffer\.[a-z_.]+)(?:[:=][^`]*)?`", PAGE))
    assert len(keys) >= 9
    assert [key for key in sorted(keys) if not is_key(key)] == []
    table = PAGE.partition("| phase |")[2].partition("\n\n")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == PHASES
