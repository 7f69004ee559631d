"""An adapter's folder, file by file: peft, vLLM and SGLang read it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rollmesh.mesh.weights.adapter import factor_names
from rollmesh.mesh.weights.peft_folder import CONFIG_NAME, WEIGHTS_NAME, write_peft_folder

FACTORS = {
    name: torch.full(shape, float(layer))
    for layer in range(2)
    for name, shape in zip(factor_names(f"model.layers.{layer}.up_proj.weight"), ((3, 6), (8, 3)), strict=True)
}
CONFIG = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "org/base",
    "r": 3,
    "lora_alpha": 12,
    "use_rslora": True,
    "target_modules": ["model.layers.0.up_proj", "model.layers.1.up_proj"],
    "lora_dropout": 0.0,
    "bias": "none",
    "inference_mode": True,
}


@pytest.mark.parametrize(
    ("settings", "differs"),
    [
        ({}, {}),
        ({"rslora": False, "base": ""}, {"use_rslora": False, "base_model_name_or_path": None}),
        ({"head": ("score", torch.ones(1, 8))}, {"task_type": "SEQ_CLS", "modules_to_save": ["score"]}),
    ],
    ids=["of a language model", "of no named base", "with a classifier's head"],
)
def test_an_adapter_is_written_as_peft_describes_it(tmp_path: Path, settings: dict, differs: dict) -> None:
    write_peft_folder(tmp_path, FACTORS, **{"alpha": 12, "rslora": True, "base": "org/base", **settings})
    assert json.loads((tmp_path / CONFIG_NAME).read_text()) == CONFIG | differs
    stored = load_file(tmp_path / WEIGHTS_NAME)
    head = {"base_model.model.score.weight": settings["head"][1]} if "head" in settings else {}
    assert stored.keys() == {*FACTORS, *head}
    assert all(torch.equal(stored[name], tensor) for name, tensor in (FACTORS | head).items())
