"""Weights come from the folder to the place where they are trained, whatever the form, and nothing is made up."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rollmesh.learner.model_files import reading
from rollmesh.mesh.errors import DataError
from tests.learner.engines.models import make_critic, make_engine, make_frozen, make_model
from tests.learner.engines.test_gradients import assert_same
from tests.learner.engines.training import weights

torch.set_num_threads(1)
FILE = "model.safetensors"


def reference(folder) -> dict[str, torch.Tensor]:
    """The weights as transformers loads them, tied ones once."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2", "qwen3_moe", "olmo_hybrid"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_masters_are_the_stored_weights(tmp_path, monkeypatch, architecture, dtype):
    monkeypatch.setattr(reading, "PIECE_BYTES", 300)
    folder = make_model(tmp_path / "model", architecture)
    AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).save_pretrained(tmp_path / "stored")
    found, expected = weights(make_engine(tmp_path / "stored")), reference(tmp_path / "stored")
    assert found.keys() == expected.keys()
    assert_same(found, expected, 0.0)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_a_frozen_model_holds_the_compute_dtype_alone(tmp_path, architecture):
    folder = make_model(tmp_path, architecture)
    engine = make_frozen(folder, param_dtype="bfloat16")
    try:
        assert {parameter.dtype for parameter in engine._runner.module.parameters()} == {torch.bfloat16}
        expected = {name: tensor.bfloat16().float() for name, tensor in reference(folder).items()}
        assert_same(weights(engine), expected, 0.0)
    finally:
        engine.close()


def test_a_tied_tensor_that_is_stored_twice_is_one(tmp_path):
    folder = make_model(tmp_path, "qwen3")
    tensors = load_file(folder / FILE)
    embedding = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding.clone()}, folder / FILE)
    assert_same(weights(make_engine(folder)), reference(folder), 0.0)
    save_file(tensors | {"lm_head.weight": embedding + 1}, folder / FILE)
    with pytest.raises(DataError, match=r"different values for model\.embed_tokens\.weight and lm_head\.weight"):
        make_engine(folder)
    # The critic has no output layer.
    make_critic(folder)


def test_the_critic_takes_the_backbone_of_any_head(tmp_path):
    folder = make_model(tmp_path, "llama")
    tensors = load_file(folder / FILE)
    del tensors["lm_head.weight"]
    save_file(tensors | {"classifier.weight": torch.zeros(7, 32)}, folder / FILE)
    found = weights(make_critic(folder))
    assert_same({name: found[name] for name in tensors}, tensors, 0.0)
    assert found.keys() - tensors.keys() == {"value_head.weight", "value_head.bias"}
    del tensors["model.norm.weight"]
    save_file(tensors, folder / FILE)
    with pytest.raises(DataError, match=r"lacks weights: model\.norm\.weight"):
        make_critic(folder)


def test_weights_of_another_shape_are_named(tmp_path):
    folder = make_model(tmp_path, "qwen3")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))
    with pytest.raises(DataError, match=r"mlp\.down_proj\.weight is \[32, 64\] instead of \[32, 48\]"):
        make_engine(folder)
