"""Memory of tensors in a file without a name: where it goes, that it comes back, and disks that refuse it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rollmesh.learner.engines import rest_file
from rollmesh.learner.engines.offload import HostCopy
from rollmesh.learner.engines.rest_file import LostTensorsError
from rollmesh.mesh.errors import SwapError
from tests.learner.failing_ranks import files_up_to

CPU = torch.device("cpu")


def make_tensors() -> list[Tensor]:
    """Tensors of several sizes; two share memory, and one is empty."""
    torch.manual_seed(0)
    whole = torch.randn(1000)
    return [
        whole[:400],
        whole[400:],
        torch.randn(30, 40),
        torch.randint(0, 255, (77,), dtype=torch.uint8),
        torch.zeros(0),
    ]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_memory_goes_into_a_file_that_nobody_can_find_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rest_file, "_CALL_BYTES", 100)
    folder, tensors = tmp_path / "made" / "here", make_tensors()
    expected = [tensor.clone() for tensor in tensors]
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    copy = HostCopy(CPU, folder)
    for _ in range(2):
        copy.to_host(tensors)
        assert copy.nbytes == 4000 + 4800 + 77
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
        assert not list(folder.iterdir()), "a process that is killed leaves nothing"
        copy.to_device()
        assert copy.nbytes == 0
        assert_equal(tensors, expected)
    assert storages == [tensor.untyped_storage()._cdata for tensor in tensors], "FSDP keeps the storages that it knows"


def test_tensors_that_never_change_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = make_tensors()
    expected = [tensor.clone() for tensor in tensors]
    copy = HostCopy(CPU, tmp_path, constant=True)
    for _ in range(3):
        copy.to_host(tensors)
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
        # From here on the disk takes nothing more.
        monkeypatch.delattr(os, "pwritev", raising=False)
        copy.to_device()
        assert_equal(tensors, expected)


def test_new_tensors_are_never_taken_for_those_that_were_written(tmp_path: Path) -> None:
    """Their storages may get the addresses of those that are gone."""
    copy = HostCopy(CPU, tmp_path, constant=True)
    for value in range(3):
        tensors = [torch.full((400,), value)]
        copy.to_host(tensors)
        copy.to_device()
        assert_equal(tensors, [torch.full((400,), value)])
        del tensors


def test_files_are_closed_once_their_bytes_are_back_or_given_up(tmp_path: Path) -> None:
    copy, before = HostCopy(CPU, tmp_path), len(os.listdir("/proc/self/fd"))
    copy.to_host(make_tensors())
    assert len(os.listdir("/proc/self/fd")) == before + 1
    copy.to_device()
    copy.to_host(make_tensors())
    copy.forget()
    assert not copy.moved
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("reserves", [True, False], ids=["before anything moves", "amid the write"])
def test_a_full_disk_leaves_everything_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, reserves: bool
) -> None:
    if not reserves:
        monkeypatch.setattr(rest_file, "_reserve", lambda *_: None)
    tensors = make_tensors()
    expected = [tensor.clone() for tensor in tensors]
    copy = HostCopy(CPU, tmp_path)
    with files_up_to(5000), pytest.raises(SwapError) as refused:
        copy.to_host(tensors)
    assert str(tmp_path) in refused.value.message
    assert "File too large" in refused.value.message
    assert "8.9 kB of state cannot" in refused.value.message
    assert refused.value.hint == "set placement.rest_dir to a folder with more room"
    assert not copy.moved
    assert_equal(tensors, expected)
    copy.to_host(tensors)
    copy.to_device()
    assert_equal(tensors, expected)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SwapError, match=str(tmp_path / "file")) as refused:
        HostCopy(CPU, tmp_path / "file" / "resting").to_host(make_tensors())
    assert "Not a directory" in refused.value.message
    assert refused.value.hint == "set placement.rest_dir to a folder that this user may write to"


def test_a_disk_that_gives_nothing_back_of_what_it_took_is_said_to_have_lost_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(rest_file, "_reserve", lambda *_: None)
    monkeypatch.setattr(os, "preadv", broken)
    with files_up_to(5000), pytest.raises(LostTensorsError, match=r"File too large.*4\.0 kB of it.*Input/output"):
        HostCopy(CPU, tmp_path).to_host(make_tensors())


def test_what_does_not_come_back_stays_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = make_tensors()
    expected = [tensor.clone() for tensor in tensors]
    copy = HostCopy(CPU, tmp_path)
    copy.to_host(tensors)
    read, calls = os.preadv, iter([True, False])

    def fail_later(*arguments: object) -> int:
        if next(calls):
            return read(*arguments)
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="Input/output"):
        patched.setattr(os, "preadv", fail_later)
        copy.to_device()
    assert copy.moved
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
    copy.to_device()
    assert_equal(tensors, expected)
