"""A checkpoint on a disk that is full."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollmesh.learner.engines.fsdp2.state import StateWriter
from rollmesh.learner.engines.world import World


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_an_error_of_the_disk(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").symlink_to("/dev/full")
    model = torch.nn.Linear(512, 512)
    writer = StateWriter(World("cpu", need_group=False))
    written = writer.begin(tmp_path, model, torch.optim.AdamW(model.parameters()), 1, {})
    with pytest.raises(OSError, match="Error"):
        written.result(30)
