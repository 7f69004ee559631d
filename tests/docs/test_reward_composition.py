"""The page about composed rewards: each example is read, and computes what it says."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from rollmesh.mesh.config.load import load_config
from rollmesh.reward_service.composition.plan import SHUT, Composition, PartOutcome
from rollmesh.reward_service.outcomes import Failed, Scored, Unscorable
from tests.repository import REPOSITORY

PAGE = (REPOSITORY / "docs" / "reward-composition.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```yaml\n(.*?)```\n\n```json\n(.*?)```", PAGE, re.DOTALL)
CASES = [(block, json.loads(row)) for block, rows in EXAMPLES for row in rows.splitlines()]
WITHOUT: dict[str, PartOutcome] = {"error": Failed("exception", "a bug"), "unscorable": Unscorable("no truth")}


@pytest.mark.parametrize(("block", "case"), CASES)
def test_examples_give_the_rewards_that_stand_there(block: str, case: dict[str, Any]) -> None:
    reward = load_config({"model": {"path": "m"}, "data": {"train": "t"}, **yaml.safe_load(block)}).reward
    source = case.get("source", "")
    composition = Composition(reward.by_data_source.get(source, reward.functions), reward.normalize.get(source))
    assert case["raw"].keys() <= set(composition.names)
    known: list[PartOutcome] = []
    for place, name in enumerate(composition.names):
        gate = composition.gates[place]
        if gate is not None and not composition.opens(place, known[gate[0]]):
            known.append(SHUT)
            continue
        raw = case["raw"][name]
        known.append(WITHOUT[raw] if isinstance(raw, str) else Scored(raw))
    outcome = composition.compose(known)
    if isinstance(outcome, Scored):
        assert outcome.total == pytest.approx(case["reward"])
    else:
        assert case["outcome"] == {Failed: "error", Unscorable: "unscorable"}[type(outcome)]


def test_there_are_examples() -> None:
    assert len(CASES) >= 15
