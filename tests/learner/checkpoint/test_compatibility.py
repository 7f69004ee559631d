"""A checkpoint is continued by the algorithm that wrote it, and its files say so before anything is loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rollmesh.learner.algorithms.interface import Algorithm
from rollmesh.learner.algorithms.load import load_algorithm
from rollmesh.learner.algorithms.types import UpdatePlan
from rollmesh.learner.checkpoint.compatibility import check_newest, trained_form
from rollmesh.mesh.config import load_config
from rollmesh.mesh.config.learner import LearnerSection
from rollmesh.mesh.config.lora import LoraSection
from rollmesh.mesh.errors import ConfigError, DataError

LEARNER = LearnerSection()


def algorithm(name: str) -> Algorithm:
    plan = UpdatePlan(minibatches=1, epochs=1, max_staleness=1, max_response_tokens=8, group_size=4, steps=10, seed=0)
    return load_algorithm(name, {}, plan)


def write(root: Path, name: str, written_by: str, *roles: str) -> None:
    for role in roles:
        (root / name / role).mkdir(parents=True)
    (root / name).mkdir(parents=True, exist_ok=True)
    state = {"steps": 3, "extra": {"algorithm": {"name": written_by, "state": {}}}}
    (root / name / "state.json").write_text(json.dumps(state))


def store(root: Path, form: dict[str, Any]) -> None:
    """Adds what the checkpoint says of the settings that it depends on."""
    path = root / "i0001-v00000001" / "state.json"
    state = json.loads(path.read_text())
    state["extra"] |= form
    path.write_text(json.dumps(state))


def test_another_algorithm_and_missing_roles_are_named(tmp_path: Path) -> None:
    grpo, ppo = algorithm("grpo"), algorithm("ppo")
    check_newest(tmp_path / "none", grpo, LEARNER)
    write(tmp_path, "i0001-v00000001", "Older")
    write(tmp_path, "i0001-v00000003", type(grpo).__qualname__)
    check_newest(tmp_path, grpo, LEARNER)
    with pytest.raises(DataError, match="i0001-v00000003 holds no state of critic"):
        check_newest(tmp_path, ppo, LEARNER)
    write(tmp_path, "i0002-v00000002", type(ppo).__qualname__, "critic")
    check_newest(tmp_path, ppo, LEARNER)
    with pytest.raises(DataError, match=f"of the algorithm {type(ppo).__qualname__}, not of {type(grpo).__qualname__}"):
        check_newest(tmp_path, grpo, LEARNER)


@pytest.mark.parametrize(
    ("learner", "message"),
    [
        ({"optimizer": {"name": "muon"}}, "the optimizer of actor has name: muon, .* was written with adamw"),
        (
            {"roles": {"critic": {"optimizer": {"state_dtype": "8bit"}}}},
            "the optimizer of critic has state_dtype: 8bit, .* was written with float32",
        ),
    ],
)
def test_another_optimizer_is_named_with_both_values(tmp_path: Path, learner: dict[str, Any], message: str) -> None:
    ppo = algorithm("ppo")
    write(tmp_path, "i0001-v00000001", type(ppo).__qualname__, "critic")
    store(tmp_path, trained_form(LEARNER, ppo))
    check_newest(tmp_path, ppo, LearnerSection.model_validate({"optimizer": {"lr": 1.0}}))
    other = LearnerSection.model_validate(learner)
    with pytest.raises(ConfigError, match=message) as caught:
        check_newest(tmp_path, ppo, other)
    assert re.match(
        r"set learner\.(roles\.critic\.)?optimizer\.\w+=\w+, or start a run under another", caught.value.hint
    )


@pytest.mark.parametrize(("before", "now"), [([], ["a"]), (["a", "b"], ["a"]), (["a"], ["b"]), (["a", "b"], [])])
def test_other_frozen_parts_are_named_and_the_hint_brings_them_back(
    tmp_path: Path, before: list[str], now: list[str]
) -> None:
    grpo = algorithm("grpo")
    write(tmp_path, "i0001-v00000001", type(grpo).__qualname__)
    store(tmp_path, trained_form(LearnerSection.model_validate({"frozen": before}), grpo))
    with pytest.raises(ConfigError, match=r"learner\.frozen is .* was written with") as caught:
        check_newest(tmp_path, grpo, LearnerSection.model_validate({"frozen": now}))
    override = caught.value.hint.removeprefix("set ").partition(", or")[0]
    values = {"model": {"path": "m"}, "data": {"train": "t"}}
    check_newest(tmp_path, grpo, load_config(values, [override]).learner)
    check_newest(tmp_path, grpo, LearnerSection.model_validate({"frozen": before[::-1]}))


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": 8, "alpha": 16, "push": "full", "start_from": "elsewhere"}, None),
        ({"rank": 8, "alpha": 32}, r"learner\.lora\.alpha is 32\.0, .* was written with 16\.0"),
        ({"rank": 4, "alpha": 16}, r"learner\.lora\.rank is 4, .* was written with 8"),
        ({"rank": 8, "alpha": 16, "targets": ["q_proj"]}, r"learner\.lora\.targets is .* was written with all-linear"),
        (None, r"learner\.lora is none, .* was written with trained"),
    ],
)
def test_another_adapter_is_named_with_both_values(tmp_path: Path, lora: dict[str, Any] | None, message: str) -> None:
    grpo = algorithm("grpo")
    write(tmp_path, "i0001-v00000001", type(grpo).__qualname__)
    store(tmp_path, trained_form(LearnerSection(lora=LoraSection(rank=8, alpha=16)), grpo))
    learner = LearnerSection.model_validate({"lora": lora})
    if message is None:
        check_newest(tmp_path, grpo, learner)
        return
    with pytest.raises(ConfigError, match=message):
        check_newest(tmp_path, grpo, learner)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"extra": {"algorithm": 3}}'])
def test_what_is_damaged_is_named_where_it_is_loaded_unless_it_is_another_algorithms(tmp_path: Path, text: str) -> None:
    write(tmp_path, "i0001-v00000001", "any")
    (tmp_path / "i0001-v00000001" / "state.json").write_text(text)
    if "extra" in text:
        with pytest.raises(DataError, match="not of"):
            check_newest(tmp_path, algorithm("grpo"), LEARNER)
    else:
        check_newest(tmp_path, algorithm("grpo"), LEARNER)
