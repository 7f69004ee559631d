"""An adapter's folder as peft writes it, merged with its base, against peft's own merge."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
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
