"""The configuration of data: short forms, and sources that contradict one another."""

from __future__ import annotations

from typing import Any

import pytest

from rollmesh.mesh.config import load_config
from rollmesh.mesh.errors import ConfigError


def _data(**values: Any) -> Any:
    return load_config({"model": {"path": "m"}, "data": {"train": "a.jsonl", **values}}).data


def test_data_are_a_path_a_source_or_a_list_of_these() -> None:
    assert [source.path for source in _data().train] == ["a.jsonl"]
    assert _data(eval={"path": "org/name", "split": "test"}).eval[0].split == "test"
    mixed = _data(train=["a.jsonl", {"path": "b.jsonl", "name": "b"}])
    assert [source.label for source in mixed.train] == ["a.jsonl", "b"]


@pytest.mark.parametrize("train", ["a.jsonl", [{"path": "a", "weight": 1.0}, {"path": "b", "weight": 2.0}]])
def test_data_are_written_as_they_were_given(train: Any) -> None:
    config = load_config({"model": {"path": "m"}, "data": {"train": train}})
    assert config.model_dump(mode="json")["data"]["train"] == train
    assert load_config(config.model_dump()) == config


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"train": [{"path": "a", "wieght": 1}]},
            r"data\.train\.0\.wieght, did you mean data\.train\.0\.weight",
        ),
        ({"eval": [{"path": "a", "pormpt_key": "q"}]}, r"did you mean data\.eval\.0\.prompt_key"),
        ({"train": []}, "at least 1 item"),
        ({"train": ["a", "a"]}, "a is there twice"),
        ({"train": ["a", {"path": "b", "weight": 1}]}, "every source a weight, or none"),
        ({"eval": [{"path": "a", "weight": 1}]}, "weights are for training alone"),
        ({"curriculum": "c.py:f"}, "needs several sources"),
        (
            {"train": [{"path": "a", "weight": 1e308}, {"path": "b", "weight": 1e308}]},
            r"data\.train\.0\.weight: .*at most 1e\+12",
        ),
        (
            {"train": [{"path": "a", "weight": 1}, {"path": "b", "weight": 1}], "curriculum": "c.py:f"},
            "gives the weights",
        ),
        ({"train": ["a", "b"], "curriculum": "c.py:f", "epochs": 2}, "no end of its own"),
    ],
)
def test_sources_that_contradict_one_another_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _data(**values)


def test_agents_take_one_template() -> None:
    values = {
        "model": {"path": "m"},
        "data": {"train": {"path": "a", "chat_template_kwargs": {"think": True}}},
        "rollout": {"agent": {"tools": ["t.py:f"]}},
    }
    with pytest.raises(ConfigError, match="the source a has chat_template_kwargs"):
        load_config(values)
