"""An adapter that the files of a model rule out is refused before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rollmesh.learner.model_files.adapter_checks import check_adapter, describe_other_base
from rollmesh.learner.model_files.checks import refuse_classifier, tensor_shapes
from rollmesh.mesh.config.lora import LoraSection
from rollmesh.mesh.errors import ConfigError, DataError
from rollmesh.mesh.weights.adapter import factor_names

UP = "model.layers.0.mlp.up_proj.weight"
SHAPES = {UP: (6, 4), "model.layers.0.norm.weight": (4,), "lm_head.weight": (9, 4)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({name: torch.zeros(shape) for name, shape in SHAPES.items()}, folder / "model.safetensors")
    return folder


def adapter(folder: Path, *, rank: int = 2, columns: int = 4, base: str = "org/base") -> Path:
    folder.mkdir()
    values = {"r": rank, "lora_alpha": 2 * rank, "base_model_name_or_path": base}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    a, b = factor_names(UP)
    save_file({a: torch.zeros(rank, columns), b: torch.zeros(6, rank)}, folder / "adapter_model.safetensors")
    return folder


def test_shapes_are_those_of_the_files(model: Path) -> None:
    assert tensor_shapes(model) == SHAPES


def test_layers_are_those_of_the_blocks(model: Path) -> None:
    check_adapter(LoraSection(rank=2, targets=["up_proj"]), model)
    check_adapter(LoraSection(rank=2), model)
    for unknown in ("nope", "lm_head"):
        with pytest.raises(ConfigError, match=f"no linear layer '{unknown}'") as refused:
            check_adapter(LoraSection(rank=2, targets=["up_proj", unknown]), model)
        assert "known: up_proj" in str(refused.value)


@pytest.mark.parametrize(
    ("stored", "section", "words"),
    [
        ({}, {}, None),
        ({"rank": 3}, {"alpha": 4}, "has rank 3, and learner.lora says 2"),
        ({}, {"alpha": 5}, "has scale 2, and learner.lora says 2.5"),
        ({"columns": 5}, {}, r"a weight of shape \[6, 5\], and the model has \[6, 4\]"),
    ],
)
def test_an_adapter_to_begin_with_is_of_this_model(
    model: Path, tmp_path: Path, stored: dict[str, int], section: dict[str, float], words: str | None
) -> None:
    folder = adapter(tmp_path / "adapter", **stored)
    values = {"rank": 2, "alpha": 4, "start_from": folder, **section}
    if words is None:
        check_adapter(LoraSection.model_validate(values), model)
        return
    with pytest.raises(DataError, match=words):
        check_adapter(LoraSection.model_validate(values), model)


def test_another_base_is_named(tmp_path: Path, model: Path) -> None:
    def said(base: str, path: str) -> str | None:
        folder = adapter(tmp_path / f"of-{base.replace('/', '-')[-20:]}-{len(path)}", base=base)
        return describe_other_base(LoraSection(rank=2, start_from=folder), path)

    assert said("org/base", "org/base") is None
    assert said(str(model), f"{model}/.") is None
    assert "was trained next to org/base, and model.path is org/other" in str(said("org/base", "org/other"))
    assert describe_other_base(LoraSection(rank=2), "org/other") is None


def test_a_classifier_is_no_policy(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"architectures": ["LlamaForCausalLM"]}')
    refuse_classifier(tmp_path, "model.path")
    path.write_text('{"architectures": ["LlamaForSequenceClassification"]}')
    with pytest.raises(DataError, match=r"model\.path: .* is a LlamaForSequenceClassification, which scores texts"):
        refuse_classifier(tmp_path, "model.path")
