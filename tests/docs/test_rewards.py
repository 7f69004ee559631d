"""The page about rewards: its scorers are those that there are, and its examples are scored as it says."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from rollmesh.reward_service.outcomes import RewardItem, Scored
from rollmesh.reward_service.scorers import SCORERS, auto
from rollmesh.reward_service.scorers.instructions.kinds import KINDS
from rollmesh.reward_service.scorers.versions import VERSIONS
from tests.repository import REPOSITORY

PAGE = (REPOSITORY / "docs" / "rewards.md").read_text()
SECTIONS = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL))
EXAMPLES = [
    (scorer, row)
    for scorer, text in SECTIONS.items()
    for block in re.findall(r"^```json\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    for row in map(json.loads, block.splitlines())
]


def test_the_table_has_all_scorers_with_their_versions() -> None:
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| [^|]*\| (\d+) \|", PAGE, re.MULTILINE)
    assert dict(rows) == dict(VERSIONS)


def test_the_sources_of_auto_are_those_that_it_knows() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (`.*`) \|$", SECTIONS["auto"], re.MULTILINE)
    assert {source: scorer for scorer, sources in rows for source in re.findall(r"`([^`]+)`", sources)} == auto.SOURCES


def test_all_instructions_are_named() -> None:
    assert set(re.findall(r"^\| `(\w+:\w+)`", SECTIONS["ifeval"], re.MULTILINE)) == KINDS.keys()


@pytest.mark.parametrize(("scorer", "row"), EXAMPLES)
def test_examples_are_scored_as_the_page_says(scorer: str, row: dict[str, Any]) -> None:
    item = RewardItem("i", "g", "", "", row["response"], row.get("ground_truth"), row.get("extra_info", {}))
    outcome = SCORERS[scorer](item)
    assert isinstance(outcome, Scored)
    assert outcome.total == pytest.approx(row["reward"])
