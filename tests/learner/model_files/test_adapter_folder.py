"""An adapter's folder as peft writes it, merged with its base, against peft's own merge."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rollmesh.learner.model_files.adapter_folder import (
    CONFIG_NAME,
    FolderAdapter,
    is_adapter_folder,
    read_adapter_config,
)
from rollmesh.learner.model_files.full_weights import read_full
from rollmesh.learner.model_files.stored_model import StoredModel
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.weights.adapter import factor_names
from rollmesh.mesh.weights.peft_folder import WEIGHTS_NAME
from tests.learner.engines.models import make_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("base"), "qwen3")


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of random values; its folder also has peft's merge, `merged.pt`."""
    from peft import LoraConfig, get_peft_model

    folder = tmp_path_factory.mktemp("adapter")
    model = AutoModelForCausalLM.from_pretrained(base)
    settings = LoraConfig(r=3, lora_alpha=12, target_modules=["q_proj", "down_proj"], use_rslora=True)
    with_adapter = get_peft_model(model, settings)
    torch.manual_seed(3)
    for name, parameter in with_adapter.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    with_adapter.save_pretrained(str(folder))
    torch.save(dict(with_adapter.merge_and_unload().named_parameters()), folder / "merged.pt")
    return folder


def test_an_adapter_is_merged_as_peft_merges_it(base: Path, adapter: Path) -> None:
    expected = torch.load(adapter / "merged.pt", weights_only=True)
    assert is_adapter_folder(adapter)
    assert not is_adapter_folder(base)
    assert read_adapter_config(adapter) == (pytest.approx(12 / 3**0.5), str(base))
    with StoredModel(base) as source:
        found = dict(read_full(source, torch.float32, FolderAdapter(adapter)))
        plain = dict(read_full(source, torch.float32))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name])
    changed = {name for name, tensor in found.items() if not torch.equal(tensor, plain[name])}
    assert changed == {name for name in found if "q_proj.weight" in name or "down_proj.weight" in name}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"use_dora": True}, "has use_dora: True"),
        ({"peft_type": "IA3"}, "has peft_type: 'IA3'"),
        ({"r": "many"}, "cannot be read"),
        ({"r": 10**400}, "cannot be read: OverflowError"),
        ({"lora_alpha": math.inf}, "cannot be read: ValidationError"),
    ],
)
def test_other_adapters_are_refused(adapter: Path, tmp_path: Path, change: dict[str, object], said: str) -> None:
    values = json.loads((adapter / CONFIG_NAME).read_text())
    (tmp_path / CONFIG_NAME).write_text(json.dumps(values | change))
    with pytest.raises(DataError, match=said):
        FolderAdapter(tmp_path)


def test_an_adapter_of_another_model_is_refused(adapter: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "gpt2", "gpt2")
    with StoredModel(other) as source, pytest.raises(DataError, match="which the model does not have"):
        next(read_full(source, torch.float32, FolderAdapter(adapter)))


def stored(folder: Path, a: Tensor, b: Tensor, layer: str = "up_proj") -> Path:
    """A folder with the adapter of one layer."""
    (folder / CONFIG_NAME).write_text(json.dumps({"r": 2, "lora_alpha": 4}))
    save_file(dict(zip(factor_names(f"{layer}.weight"), (a, b), strict=True)), folder / WEIGHTS_NAME)
    return folder


@pytest.mark.parametrize("a", [(), (2,), (2, 4, 1), (3, 4), (0, 4)])
def test_factors_that_have_no_product_are_refused(tmp_path: Path, a: tuple[int, ...]) -> None:
    folder = stored(tmp_path, torch.zeros(a), torch.zeros(6, 2))
    with pytest.raises(DataError, match=rf"the factors of up_proj have the shapes \{list(a)} and \[6, 2\]"):
        FolderAdapter(folder)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_the_adapters_own(tmp_path: Path, value: float) -> None:
    adapter = FolderAdapter(stored(tmp_path, torch.full((2, 4), value), torch.zeros(6, 2)))
    with pytest.raises(DataError, match=rf"adapter {tmp_path}: the factors of up_proj have .* not finite"):
        adapter.read("up_proj")


def test_a_config_of_endless_depth_is_refused(tmp_path: Path) -> None:
    (tmp_path / CONFIG_NAME).write_text("[" * 100_000)
    with pytest.raises(DataError, match="cannot be read: RecursionError"):
        read_adapter_config(tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    (stored(tmp_path, torch.zeros(2, 4), torch.zeros(6, 2)) / WEIGHTS_NAME).unlink()
    os.mkfifo(tmp_path / WEIGHTS_NAME)
    with pytest.raises(DataError, match=f"{WEIGHTS_NAME} is a pipe"):
        FolderAdapter(tmp_path)
