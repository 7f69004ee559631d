"""Folders are written tensor by tensor, and read by transformers and safetensors as their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rollmesh.learner.folder_facts.weight_names import SINGLE_NAME
from rollmesh.learner.model_files.folder_writer import write_folder
from rollmesh.learner.model_files.stored_model import StoredModel
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.weights.safetensors_format import INDEX_NAME
from tests.learner.engines.models import make_model


def stream(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors whose memory is overwritten once the next is asked for."""
    for name, tensor in tensors.items():
        shared = tensor.clone()
        yield name, shared
        shared.fill_(77 if shared.dtype != torch.bool else True)


def write(source: Path, out: Path, dtype: torch.dtype, file_bytes: int) -> dict[str, torch.Tensor]:
    """Writes a model again; gives what must be stored."""
    weights = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).state_dict()
    with StoredModel(source) as stored:
        described = stored.describe()
        write_folder(out, stored, described, stream({name: weights[name] for name in described}), dtype, file_bytes)
    return {name: tensor.to(dtype) for name, tensor in load_file(source / SINGLE_NAME).items()}


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe", "olmo_hybrid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_holds_the_same_bytes(tmp_path: Path, architecture: str, dtype: torch.dtype) -> None:
    expected = write(make_model(tmp_path / "model", architecture), tmp_path / "out", dtype, 1 << 30)
    found = load_file(tmp_path / "out" / SINGLE_NAME)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == dtype
    assert loaded.config.architectures == [type(loaded).__name__]


def test_large_models_are_written_in_several_files(tmp_path: Path) -> None:
    source = make_model(tmp_path / "model", "qwen3_moe")
    expected = write(source, tmp_path / "out", torch.bfloat16, 5000)
    index = json.loads((tmp_path / "out" / INDEX_NAME).read_text())
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    names = sorted(set(index["weight_map"].values()))
    assert names == [f"model-{i + 1:05d}-of-{len(names):05d}.safetensors" for i in range(len(names))]
    for name in names:
        tensors = load_file(tmp_path / "out" / name)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 5000
        assert all(torch.equal(tensor, expected.pop(key)) for key, tensor in tensors.items())
    assert not expected
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_whole_numbers_have_a_file_of_their_own(tmp_path: Path) -> None:
    """In one with an odd number of bytes before them no reader could take them."""
    source = make_model(tmp_path / "model", "llama")
    weights = AutoModelForCausalLM.from_pretrained(source).state_dict()
    numbers = {"model.flags": torch.tensor([True, False, True]), "model.counts": torch.tensor([1 << 40])}
    with StoredModel(source) as stored:
        described = numbers | stored.describe()
        described = {name: torch.empty_like(tensor, device="meta") for name, tensor in described.items()}
        write_folder(tmp_path / "out", stored, described, stream(numbers | weights), torch.bfloat16)
    found = load_file(tmp_path / "out" / "model-00002-of-00002.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in numbers.items())
    assert len(found) == len(numbers)


def test_what_the_disk_refuses_is_no_model_yet(tmp_path: Path) -> None:
    source = make_model(tmp_path / "model", "llama")
    (tmp_path / "out" / SINGLE_NAME).mkdir(parents=True)
    with pytest.raises(DataError, match=r"cannot write .*out: Is a directory"):
        write(source, tmp_path / "out", torch.float32, 1 << 30)
    assert not (tmp_path / "out" / "config.json").exists()
