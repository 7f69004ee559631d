"""The configuration of the judge: refused where it is contradictory, and part of what measurements depend on."""

from pathlib import Path
from typing import Any

import pytest

from rollmesh.learner.evaluation.measurement_identity import reward_measurement
from rollmesh.learner.recovery.run_identity import reward_files
from rollmesh.mesh.config import load_as
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.reward import RewardSection
from rollmesh.mesh.errors import ConfigError
from rollmesh.reward_service.composition.part import Part
from rollmesh.reward_service.configured import with_configured

HERE = {"base_url": "http://127.0.0.1:9/v1", "model": "m"}


def section(**judge: Any) -> RewardSection:
    return RewardSection(functions=["judge"], judge={**HERE, **judge})  # type: ignore[arg-type]  # as of a file


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({}, "needs reward.judge.base_url"),
        ({"judge": {**HERE, "timeout_s": 7.5}}, "deadlines must nest"),
        ({"judge": {**HERE, "base_url": "judge.example"}}, "needs https://HOST/v1"),
        ({"judge": {**HERE, "base_url": "https://user:pass@judge.example/v1"}}, "without login"),
        ({"judge": {**HERE, "scale": [5, 5]}}, "least score"),
        ({"judge": {**HERE, "votes": 3, "temperature": 0}}, "temperature"),
        ({"judge": {**HERE, "budget_cost": 5}}, "prompt_price"),
        ({"judge": {**HERE, "hedged_share": 0.5}}, "hedged_share"),
        ({"judge": {**HERE, "options": {"api_key": "sk-123"}}}, "looks like a secret"),
    ],
)
def test_contradictions_are_refused(reward: dict[str, Any], message: str) -> None:
    given = {"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"functions": ["judge"], **reward}}
    with pytest.raises(ConfigError, match=message):
        load_as(Config, given)


def test_a_source_may_name_the_judge() -> None:
    reward = RewardSection(by_data_source={"essays": ["judge", "none"]}, judge=HERE)  # type: ignore[arg-type]
    functions, by_source = with_configured(reward, reward.functions, reward.by_data_source)
    assert list(functions) == [Part("auto")]
    assert [getattr(part.use, "__name__", part.use) for part in map(Part.of, by_source["essays"])] == ["judge", "none"]


def test_functions_of_a_program_need_an_endpoint_too() -> None:
    with pytest.raises(ConfigError, match="base_url"):
        with_configured(RewardSection(), ["judge"], {})


def test_the_judge_counts_where_it_is_asked(tmp_path: Path) -> None:
    plain = reward_measurement(RewardSection(judge=HERE), ["auto"])  # type: ignore[arg-type]
    assert not [key for key in plain if "judge" in key]
    template = tmp_path / "template.yaml"
    template.write_text("user: '{response}'")
    one = reward_measurement(section(template=template), ["judge"])
    template.write_text("user: 'grade {response}'")
    assert one != reward_measurement(section(template=template), ["judge"])
    assert reward_measurement(section(), ["judge"]) != reward_measurement(section(model="other"), ["judge"])
    assert reward_measurement(section(), ["judge"]) == reward_measurement(section(concurrency=1), ["judge"])
    assert reward_files(section(template=template)) == [template]
