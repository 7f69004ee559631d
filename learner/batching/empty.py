"""The smallest micro-batch: ranks without a share compute it, so that all run the same number of passes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from rollmesh.learner.batching.pack import pack
from rollmesh.learner.batching.types import PackedBatch, TrainSequence


def empty_batch(device: torch.device) -> PackedBatch:
    """Makes one prompt token, and one that is trained; no results of it are read, and it counts as no response's."""
    one = np.zeros(1, dtype=np.int32)
    sequence = TrainSequence(one, one, np.ones(1, dtype=np.uint8), np.zeros(1, dtype=np.float32))
    batch = pack([sequence], device=device)
    return replace(batch, row=replace(batch.row, responses=np.zeros_like(batch.row.responses)))
