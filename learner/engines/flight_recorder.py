"""NCCL's flight recorder: the last collectives of each rank, written when one of them times out."""

from __future__ import annotations

import os
from pathlib import Path

import torch

FOLDER = "nccl"
_ENTRIES = 2000


def record_collectives(run_folder: Path) -> None:
    """Switches it on where there is NCCL, before a process group is made; what the user has set stays.

    torch (2.11 to 2.13, `FlightRecorder.hpp`) records by default and writes to `/tmp`, which ends with a container.

    Args:
        run_folder: gets `nccl/rank_N`, by which `torchfrtrace` finds the rank that did not take part.
    """
    if not torch.cuda.is_available():
        return
    folder = run_folder / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in {
        "TORCH_FR_BUFFER_SIZE": str(_ENTRIES),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(folder / "rank_"),
    }.items():
        os.environ.setdefault(name, value)
