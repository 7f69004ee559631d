"""A model is planned from headers alone, converted both ways as transformers does it, and refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollmesh.learner.folder_facts.weight_names import SINGLE_NAME
from rollmesh.learner.model_files.conversion import group_for_storing, to_stored
from rollmesh.learner.model_files.stored_model import StoredModel
from rollmesh.learner.model_files.weight_files import full_part
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.model_config import read_config
from rollmesh.planning.architecture import build_on_meta
from tests.learner.engines.models import make_model

# Plain, tied, other names in files, experts, experts of several lists, whole tensors that are joined, shared layers.
ARCHITECTURES = ("qwen3", "gpt2", "qwen3_moe", "mixtral", "jamba", "olmo_hybrid", "zamba2", "gemma3n_text")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """A model folder, and the model as transformers loads it."""
    folder = make_model(tmp_path_factory.mktemp(request.param), request.param)
    return folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_weights_and_buffers_are_those_of_transformers(loaded: tuple[Path, PreTrainedModel]) -> None:
    folder, model = loaded
    expected = model.state_dict()
    with StoredModel(folder) as stored:
        made: dict[str, torch.Tensor] = {}
        for conversion in stored.plan.conversions:
            read = [(source, stored.files.read(source[0], shape(stored, source[0]))) for source in conversion.sources]
            made |= (results := conversion.apply(stored.model, read))
            assert {name: tensor.shape for name, tensor in results.items()} == {
                name: tensor.shape for name, tensor in conversion.results.items()
            }
            if conversion.is_by_expert:
                ((name, whole_result),) = results.items()
                some = [pair for pair in read if pair[0] in conversion.of_experts(1, 3)]
                assert torch.equal(conversion.apply(stored.model, some)[name], whole_result[1:3])
        assert dict(model.named_parameters()).keys() <= made.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in made.items())
        buffers = dict(model.named_buffers())
        assert all(torch.equal(buffer, buffers[name]) for name, buffer in stored.model.named_buffers())
        assert all(parameter.is_meta for parameter in stored.model.parameters())
        assert stored.model.config._attn_implementation == model.config._attn_implementation


def test_the_way_back_gives_what_is_stored(loaded: tuple[Path, PreTrainedModel]) -> None:
    folder, model = loaded
    with StoredModel(folder) as stored:
        described = stored.describe()
        state = model.state_dict()
        back: dict[str, torch.Tensor] = {}
        for group in group_for_storing(stored.model, described):
            back |= to_stored(stored.model, {name: state[name] for name in group})
    assert_equal(back, load_file(folder / SINGLE_NAME))


def test_experts_are_made_of_their_own_sources(tmp_path: Path) -> None:
    with StoredModel(make_model(tmp_path, "qwen3_moe")) as stored:
        (first, _) = [c for c in stored.plan.conversions if c.target.endswith("gate_up_proj")]
        assert first.is_by_expert
        names = [name for name, _ in first.of_experts(2, 4)]
        layer = "model.layers.0.mlp.experts"
        assert names == [f"{layer}.{expert}.{kind}.weight" for kind in ("gate_proj", "up_proj") for expert in (2, 3)]
    with StoredModel(make_model(tmp_path / "joined", "olmo_hybrid")) as stored:
        assert not any(c.is_by_expert for c in stored.plan.conversions)


def without(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("model.norm.weight"), r"lacks weights: model\.norm\.weight \("),
        (without("model.layers.1.mlp.experts.3.up_proj.weight"), r"model\.layers\.1\.mlp\.experts\.gate_up_proj"),
        (
            lambda tensors: tensors | {"model.extra": torch.zeros(2)},
            r"holds weights that are not used: model\.extra \(",
        ),
        (
            lambda tensors: tensors | {"model.norm.weight": torch.zeros(3)},
            r"another shape than config\.json says: model\.norm\.weight is \[3\] instead of \[32\]",
        ),
        (lambda tensors: {}, r"lacks weights: .* and \d+ more"),
    ],
)
def test_weights_that_are_not_those_of_the_model_are_named(
    tmp_path: Path, change: Callable[[dict[str, Any]], dict[str, Any]], message: str
) -> None:
    folder = make_model(tmp_path, "qwen3_moe")
    save_file(change(load_file(folder / SINGLE_NAME)), folder / SINGLE_NAME)
    with pytest.raises(DataError, match=message):
        StoredModel(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized weights"),
        ({"model_type": "no_such_model"}, "cannot load model"),
        ({"model_type": "t5"}, "cannot load model"),
        ({"num_hidden_layers": 1_000_000}, "num_hidden_layers: 1000000, .* from 1 to 10000"),
        ({"hidden_size": None}, "expected int, got NoneType"),
        ({"layer_types": ["nothing", "nothing"]}, "validate_layer_type"),
        ({"text_config": "x"}, "AttributeError"),
        ({"hidden_act": "nothing"}, "KeyError: 'nothing'"),
    ],
)
def test_configurations_that_cannot_be_trained_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = make_model(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(DataError, match=message):
        StoredModel(folder)
    if "quantization_config" not in change:
        with pytest.raises(DataError, match=message):
            build_on_meta(read_config(folder))


def shape(stored: StoredModel, name: str) -> tuple[slice, ...]:
    return full_part(stored.files.stored[name])


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
