"""Labels, activations, and what a folder must hold: no model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmesh.mesh.errors import RewardError
from rollmesh.reward_service.served_model.engine import activated, label_index
from rollmesh.reward_service.served_model.folders import CAUSAL, CLASSIFIER, TOKEN_CLASSIFIER, kind_of
from rollmesh.reward_service.served_model.messages import ModelOptions


def test_the_label_is_named_where_there_are_several() -> None:
    names = {0: "bad", 1: "good"}
    assert label_index(ModelOptions("response", "m"), {0: "only"}) == 0
    assert label_index(ModelOptions("response", "m", label="good"), names) == 1
    assert label_index(ModelOptions("response", "m", label="0"), names) == 0
    assert label_index(ModelOptions("steps", "m"), names) == 1
    with pytest.raises(RewardError, match="has 2 labels"):
        label_index(ModelOptions("response", "m"), names)
    with pytest.raises(RewardError, match="no label 'fine'"):
        label_index(ModelOptions("response", "m", label="fine"), names)
    with pytest.raises(RewardError, match="has one label"):
        label_index(ModelOptions("response", "m", activation="softmax"), {0: "only"})


def test_activations_are_exact_for_large_logits() -> None:
    assert activated([3.0], 0, "none") == 3.0
    assert activated([0.0], 0, "sigmoid") == 0.5
    assert activated([-1000.0], 0, "sigmoid") == 0.0
    assert activated([1000.0, 1000.0], 1, "softmax") == 0.5


def test_a_folder_says_what_it_holds(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="does not exist"):
        kind_of(tmp_path / "absent", (CLASSIFIER,), "sequence classifier")
    left = tmp_path / "run" / "hf" / "last"
    left.mkdir(parents=True)
    (left / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(RewardError, match="is the folder of a run") as refused:
        kind_of(tmp_path / "run", (CLASSIFIER,), "sequence classifier")
    assert str(left) in str(refused.value)
    with pytest.raises(RewardError, match="is a LlamaForCausalLM, and no sequence classifier"):
        kind_of(left, (CLASSIFIER,), "sequence classifier")
    assert kind_of(left, (TOKEN_CLASSIFIER, CAUSAL), "model of steps") == CAUSAL
