"""Weights by nccl between two devices: the learner on the first one in its own process, the receiver on the second."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import torch

from mesh.weights import Wanted
from tests.generators.weights.transports.cases import NCCL
from tests.generators.weights.transports.world import Arrivals, remote_learner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="nccl needs a device per process: two CUDA devices"),
]


async def test_bytes_come_whole_from_another_process(tmp_path: Path) -> None:
    torch.cuda.set_device(1)
    async with remote_learner(NCCL, tmp_path) as learner:
        wanted = Wanted.full(learner.manifest)
        receiver = learner.receiver()
        assert receiver.refusal(wanted) == ""
        for _ in range(2):
            arrivals, began = Arrivals(wanted), time.perf_counter()
            transfer = receiver.receive(learner.fetch(wanted, 30.0, "one"), arrivals)
            arrivals.check(await asyncio.wait_for(transfer, 60))
            print(f"nccl: {wanted.nbytes / (time.perf_counter() - began) / 1e9:.2f} GB/s, checks included")
