"""A checkpoint on a disk that is full."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollmesh.learner.engines.fsdp2.state import save_state


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_an_error_of_the_disk(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").symlink_to("/dev/full")
    model = torch.nn.Linear(512, 512)
    world: Any = SimpleNamespace(process=0, processes=1, barrier=lambda: None)
    with pytest.raises(OSError, match="Error"):
        save_state(tmp_path, world, model, torch.optim.AdamW(model.parameters()), 1, {})
