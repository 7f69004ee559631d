"""Stored tensors are read in parts, and what cannot be read is named."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rollmesh.learner.folder_facts.weight_names import SINGLE_NAME
from rollmesh.learner.model_files.weight_files import WeightFiles, full_part, pieces
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.weights.safetensors_format import INDEX_NAME

TENSORS = {
    "rows": torch.arange(12.0).view(3, 4),
    "half": torch.arange(4).to(torch.bfloat16),
    "number": torch.tensor(7),
    "none": torch.zeros(0, 2),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files and their index."""
    for name in ("rows", "half"):
        save_file({name: TENSORS[name]}, tmp_path / f"{name}.safetensors")
    save_file({name: TENSORS[name] for name in ("number", "none")}, tmp_path / "rest.safetensors")
    weight_map = dict.fromkeys(("number", "none"), "rest.safetensors")
    weight_map |= {name: f"{name}.safetensors" for name in ("rows", "half")}
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def test_parts_are_read_in_their_dtype(folder: Path) -> None:
    files = WeightFiles(folder)
    assert {name: (t.shape, t.dtype) for name, t in files.stored.items()} == {
        name: (t.shape, t.dtype) for name, t in TENSORS.items()
    }
    for name, tensor in TENSORS.items():
        read = files.read(name, full_part(tensor))
        assert read.dtype == tensor.dtype
        assert torch.equal(read, tensor)
    assert files.read("rows", (slice(1, 3), slice(2, 3))).tolist() == [[6.0], [10.0]]
    assert files.read("rows", (slice(3, 3), slice(0, 4))).shape == (0, 4)
    files.close()


def test_pieces_have_at_most_the_bytes_and_at_least_a_row() -> None:
    part = (slice(2, 7), slice(0, 4))
    assert [piece[0] for piece in pieces(part, 4, 40)] == [slice(2, 4), slice(4, 6), slice(6, 7)]
    assert [piece[0] for piece in pieces(part, 4, 1)] == [slice(row, row + 1) for row in range(2, 7)]
    assert list(pieces(part, 4, 1 << 20)) == [part]
    assert list(pieces((slice(5, 5), slice(0, 4)), 4, 40)) == []
    assert list(pieces((slice(0, 5), slice(0, 0)), 4, 40)) == []
    assert list(pieces((), 4, 40)) == [()]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / INDEX_NAME).unlink(), f"neither {SINGLE_NAME} nor {INDEX_NAME}"),
        (lambda folder: (folder / INDEX_NAME).write_text("[]"), "cannot be read"),
        (lambda folder: (folder / INDEX_NAME).write_text("[" * 100_000), "cannot be read"),
        (
            lambda folder: (folder / INDEX_NAME).write_text('{"weight_map": {"a": "../x.safetensors"}}'),
            "names '../x.safetensors', a file outside of",
        ),
        (lambda folder: (folder / "rows.safetensors").unlink(), "rows.safetensors cannot be read"),
        (lambda folder: (folder / "rows.safetensors").write_bytes(b"version"), "rows.safetensors is cut off"),
        (
            lambda folder: (folder / "rows.safetensors").write_bytes((100_000).to_bytes(8, "little") + b"[" * 100_000),
            "rows.safetensors is cut off or damaged",
        ),
        (lambda folder: os.truncate(folder / "rows.safetensors", 80), "rows.safetensors is cut off"),
        (
            lambda folder: os.truncate(folder / "half.safetensors", (folder / "half.safetensors").stat().st_size - 1),
            "half.safetensors is cut off or damaged: tensor half is not whole",
        ),
        (
            lambda folder: save_file({"rows": torch.zeros(4).to(torch.float8_e4m3fn)}, folder / "rows.safetensors"),
            "tensor rows is stored as F8_E4M3",
        ),
    ],
)
def test_what_cannot_be_read_is_named(folder: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(folder)
    with pytest.raises(DataError, match=message):
        WeightFiles(folder)


def test_a_file_that_is_cut_off_under_its_reader_is_named(folder: Path) -> None:
    files = WeightFiles(folder)
    path = folder / "rows.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 8)
    assert files.read("rows", (slice(0, 1), slice(0, 4))).tolist() == [[0.0, 1.0, 2.0, 3.0]]
    with pytest.raises(DataError, match="tensor rows is not whole"):
        files.read("rows", full_part(TENSORS["rows"]))
