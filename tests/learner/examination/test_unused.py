"""Stored tensors that the opened model does not use are found, whatever their names, and said by module and number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, Qwen3_5Config

from rollmesh.learner.examination.unused import describe_unused, unused_tensors
from rollmesh.learner.folder_facts.weight_names import SINGLE_NAME
from rollmesh.learner.model_files.stored_model import StoredModel
from rollmesh.learner.model_files.weight_files import full_part
from rollmesh.mesh.errors import DataError
from tests.learner.engines.models import make_model

_TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
_SIGHT = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}


def add(folder: Path, *names: str, like: str = "") -> None:
    """Stores further tensors: of two numbers, or with another one's values."""
    tensors = load_file(folder / SINGLE_NAME)
    added = {name: tensors[like].clone() if like else torch.tensor([3.0, 4.0]) for name in names}
    save_file(tensors | added, folder / SINGLE_NAME, {"format": "pt"})


def test_sight_and_prediction_layers_of_a_composite_model(tmp_path: Path) -> None:
    config = Qwen3_5Config(text_config=_TEXT, vision_config=_SIGHT, tie_word_embeddings=False)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    add(tmp_path, "mtp.fc.weight", "mtp.layers.0.norm.weight")
    tensors = load_file(tmp_path / SINGLE_NAME)
    sight = {name for name in tensors if name.startswith("model.visual.")}
    with StoredModel(tmp_path) as source:
        found = unused_tensors(source)
        assert found.keys() == sight | {"mtp.fc.weight", "mtp.layers.0.norm.weight"}
        for name, shaped in found.items():
            assert torch.equal(source.files.read(name, full_part(shaped)), tensors[name])
        told = describe_unused(source)
    assert told is not None
    assert f"{len(sight) + 2} tensors of {tmp_path} are not used by Qwen3_5ForCausalLM" in told
    assert told.endswith(f": model.visual.* ({len(sight)}), mtp.* (2)")


@pytest.mark.parametrize(
    ("architecture", "names", "told"),
    [
        ("qwen3", ["mtp.norm.weight", "model.mtp_layers.0.a.weight"], "model.mtp_layers.* (1), mtp.* (1)"),
        ("deepseek_v3", ["model.layers.2.enorm.weight", "model.layers.2.mlp.b.weight"], "model.layers.2.* (2)"),
        (
            "llama",
            [f"model.layers.{number}.self_attn.rotary_emb.inv_freq" for number in (0, 1)],
            "model.layers.*.self_attn.rotary_emb.* (2)",
        ),
    ],
)
def test_what_is_beside_a_model_of_text(tmp_path: Path, architecture: str, names: list[str], told: str) -> None:
    folder = make_model(tmp_path, architecture)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    with StoredModel(folder) as source:
        assert (unused_tensors(source), describe_unused(source)) == ({}, None)
    add(folder, *names)
    with StoredModel(folder) as source:
        assert unused_tensors(source).keys() == set(names)
        assert str(describe_unused(source)).endswith(f": {told}")


def test_a_layer_after_the_last_one_is_refused_where_the_configuration_names_none(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "llama")
    add(folder, "model.layers.2.norm.weight")
    with pytest.raises(DataError, match=r"holds weights that are not used: model\.layers\.2\.norm\.weight"):
        StoredModel(folder)


def test_a_tensor_that_is_there_under_two_names_is_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "llama")
    add(folder, "norm.weight", like="model.norm.weight")
    with pytest.raises(DataError, match=r"a second tensor for what the model has once: norm\.weight"):
        StoredModel(folder)
