"""A written adapter has its products where they were trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollmesh.learner.written.adapter import check_written_adapter
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.weights.peft_folder import CONFIG_NAME, WEIGHTS_NAME, write_peft_folder
from tests.learner.engines.models import make_model

A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
B = A.replace("lora_A", "lora_B")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("base") / "model", "qwen2")


def _drop_b(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS_NAME)
    del tensors[B]
    save_file(tensors, folder / WEIGHTS_NAME)


def _narrow(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS_NAME)
    save_file({A: tensors[A][:, 1:].contiguous(), B: tensors[B]}, folder / WEIGHTS_NAME)


def _rename(folder: Path) -> None:
    other = {name.replace("q_proj", "o_gate"): one for name, one in load_file(folder / WEIGHTS_NAME).items()}
    save_file(other, folder / WEIGHTS_NAME)
    _name_layers(folder, "model.layers.0.self_attn.o_gate")


def _name_layers(folder: Path, *names: str) -> None:
    path = folder / CONFIG_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target_modules": names}))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda _: None, ""),
        (_drop_b, "its layers are not those"),
        (_narrow, "does not fit the model's weight"),
        (_rename, "its product for .*o_gate does not fit"),
        (lambda folder: _name_layers(folder, "q_proj"), "its layers are not those"),
        (lambda folder: (folder / WEIGHTS_NAME).write_bytes(b"no"), "it cannot be read"),
        (lambda folder: (folder / CONFIG_NAME).unlink(), "it cannot be read"),
    ],
)
def test_what_peft_would_read_otherwise_is_refused(
    model: Path, tmp_path: Path, spoil: Callable[[Path], None], said: str
) -> None:
    write_peft_folder(tmp_path, {A: torch.ones(2, 32), B: torch.ones(32, 2)}, alpha=4, rslora=False, base=str(model))
    spoil(tmp_path)
    if not said:
        check_written_adapter(tmp_path, model)
        return
    with pytest.raises(DataError, match=said):
        check_written_adapter(tmp_path, model)
