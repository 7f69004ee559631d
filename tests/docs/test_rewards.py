"""The page about rewards: its scorers are those that there are, and its examples are scored as it says."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from rollmesh.reward_service.outcomes import RewardItem, Scored
from rollmesh.reward_service.row_faults import fault_of
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


_FORMS = {"text": "34", "number": 34.0, "list of one": ["34"], "list of several": ["34", "35"], "object": {"a": "34"}}
# Texts, and what stands in lists and objects, of scorers that do not mean just any.
_SAMPLES: dict[str, dict[str, Any]] = {
    "choice": {"text": "B", "number": 1.0, "list of one": ["B"], "list of several": ["A", "B"]},
    "code": {"text": "assert f() == 1", "list of one": ["assert 1"], "list of several": ["assert 1", "assert 2"]},
    "ifeval": {"text": '{"instruction_id": ["punctuation:no_comma"]}'},
    "json_schema": {"text": '{"type": "object"}', "object": {"type": "object"}},
    "qa": {"object": {"target": ["34"]}},
}
_SAMPLES["ifeval"]["object"] = json.loads(_SAMPLES["ifeval"]["text"])
_SAMPLES["ifeval"]["list of one"] = [_SAMPLES["ifeval"]["object"]]
_SAMPLES["code"]["object"] = {"test_list": ["assert 1"]}
for _name in ("code", "ifeval", "json_schema"):
    _SAMPLES[f"{_name}_fraction"] = _SAMPLES[_name]


def test_forms_of_ground_truths_are_those_of_the_table() -> None:
    table = PAGE.partition("## Ground truths")[2].partition("\n## ")[0]
    found = set()
    for names, *cells in re.findall(
        r"^\| (`.*?`) \| (.*?) \| (.*?) \| (.*?) \| (.*?) \| (.*?) \|$", table, re.MULTILINE
    ):
        for name in re.findall(r"`(\w+)`", names):
            found.add(name)
            for (form, truth), cell in zip((_FORMS | _SAMPLES.get(name, {})).items(), cells, strict=True):
                fault = fault_of(name, RewardItem("i", "g", "", "", "", truth))
                assert bool(fault) == (cell == "no"), (name, form, fault)
    assert found == {*VERSIONS} - {"auto", "environment", "none"}


@pytest.mark.parametrize(
    ("scorer", "response", "truth", "reward"),
    re.findall(r"^\| `(\w+)` \| `(.*?)` \| `(.*?)` \| (-?\d\.\d) \| ", PAGE, re.MULTILINE),
)
def test_rules_that_are_not_a_readers_are_as_the_table_says(
    scorer: str, response: str, truth: str, reward: str
) -> None:
    outcome = SCORERS[scorer](RewardItem("i", "g", "", "", response, truth))
    assert isinstance(outcome, Scored)
    assert outcome.total == float(reward)
    if scorer not in ("qa", "math"):
        reads_values = "gsm8k" if scorer.startswith("gsm8k") else "math"
        reader = SCORERS[reads_values](RewardItem("i", "g", "", "", response, truth))
        assert isinstance(reader, Scored)
        assert reader.total == 1.0
