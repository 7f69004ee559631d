"""A checkpoint on a disk that is full."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from rollmesh.learner.engines.fsdp2.optimizer_state import saved_state
from rollmesh.learner.engines.tensors.state import StateWriter
from rollmesh.learner.engines.world import World


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_an_error_of_the_disk(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"^\[Errno 28\] No space left on device, \d+\.\d GB free on its disk$"):
        _write(tmp_path)


def test_a_disk_that_refuses_amid_a_file_is_named_by_its_own_words(tmp_path: Path) -> None:
    """torch then complains of a position in its file, whatever the cause was."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, most[1]))
    try:
        with pytest.raises(OSError, match=r"^\[Errno 27\] File too large, \d+\.\d GB free on its disk$"):
            _write(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)


def _write(folder: Path) -> None:
    model = torch.nn.Linear(512, 512)
    writer = StateWriter(World("cpu", need_group=False))
    writer.begin(folder, saved_state(model.named_parameters(), torch.optim.AdamW(model.parameters())), 1, {}).result(
        180
    )
