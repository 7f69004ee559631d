"""Rewards of steps, from the model's process to spans of the outcome."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from rollmesh.mesh.config.reward import RewardSection
from rollmesh.mesh.errors import RewardError
from rollmesh.reward_service.configured import BUILDERS
from rollmesh.reward_service.outcomes import RewardItem, Scored, Unscorable, checked_outcome
from rollmesh.reward_service.process.process import ProcessRewards
from rollmesh.reward_service.served_model.messages import Text
from rollmesh.reward_service.served_model.model import Answer
from tests.reward_service.tiny_models import write_model


class Asked:
    """Stands for the model's process: values by the place of each step, or of the last one."""

    def __init__(self, scorer: ProcessRewards) -> None:
        self.texts: list[Text] = []
        scorer._model = self  # type: ignore[assignment]

    async def ask(self, texts: list[Text]) -> list[Answer]:
        self.texts += texts
        return [
            [0.5 + 0.25 * place for place in range(len(text[1]) if isinstance(text[1], list) else 1)] for text in texts
        ]


def built(folder: Path, **options: object) -> ProcessRewards:
    section = RewardSection.model_validate({"functions": ["process"], "process": {"model": str(folder), **options}})
    scorer = BUILDERS["process"](section)
    assert isinstance(scorer, ProcessRewards)
    return scorer


def item(response: str) -> RewardItem:
    return RewardItem(response, "g", "s", "1+1=", response)


def test_values_of_steps_are_the_reward_and_spans_where_wanted(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", AutoModelForTokenClassification, labels=2)
    scorer = built(folder, per_step=True)
    asked = Asked(scorer)
    two, none, one = (asyncio.run(scorer(item(text))) for text in ("first\n\n then", " \n", "all"))
    assert [text[1] for text in asked.texts] == [["first", "then"], ["all"]]
    assert isinstance(two, Scored)
    assert (two.total, two.spans) == (0.5, [(0, 5, 0.5), (8, 12, 0.75)])
    assert two.components == {"steps": 2.0, "least": 0.5, "last": 0.75}
    assert two.evidence == "steps 0-5: 0.5, 8-12: 0.75"
    assert checked_outcome(two, item("first\n\n then"), "process") is two
    assert isinstance(none, Unscorable)
    assert isinstance(one, Scored)
    plain = built(folder, total="mean")
    Asked(plain)
    outcome = asyncio.run(plain(item("first\n\n then")))
    assert isinstance(outcome, Scored)
    assert (outcome.total, outcome.spans) == (0.625, [])


def test_a_sequence_classifier_judges_the_response_up_to_each_step(tmp_path: Path) -> None:
    scorer = built(write_model(tmp_path / "model", AutoModelForSequenceClassification), activation="sigmoid")
    asked = Asked(scorer)
    outcome = asyncio.run(scorer(item("first\n\n then")))
    assert [text[1] for text in asked.texts] == ["first", "first\n\n then"]
    assert isinstance(outcome, Scored)
    assert outcome.components["steps"] == 2.0


def test_a_configuration_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"needs reward\.process\.model"):
        RewardSection(functions=["process"])
    for options, message in (
        ({"total": "none"}, "needs per_step"),
        ({"good": "+"}, "both `good` and `bad`"),
        ({"engine": "sglang", "url": "http://h:1"}, "no values of single tokens"),
        ({"total": "product", "activation": "none"}, "needs values from 0 to 1"),
    ):
        with pytest.raises(ValueError, match=message):
            RewardSection.model_validate({"process": options})
    with pytest.raises(RewardError, match="does not exist"):
        built(tmp_path)
