"""Weights by nccl between two devices: the learner on the first one in its own process, the receiver on the second."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import pytest
import torch

from rollmesh.mesh.weights import BucketSet
from tests.generators.weights.transports.cases import NCCL
from tests.generators.weights.transports.test_broadcast import (
    DEADLINE_S,
    STALL_S,
    Receiver,
    offered,
    stopping_receiver,
    until,
)
from tests.generators.weights.transports.world import Arrivals, local_learner, remote_learner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="nccl needs a device per process: two CUDA devices"),
]


async def test_bytes_come_whole_from_another_process(tmp_path: Path) -> None:
    torch.cuda.set_device(1)
    async with remote_learner(NCCL, tmp_path) as learner:
        bucket_set = BucketSet.full(learner.manifest)
        receiver = learner.receiver()
        assert receiver.refusal(bucket_set) == ""
        for _ in range(2):
            arrivals, began = Arrivals(bucket_set), time.perf_counter()
            transfer = receiver.receive(learner.fetch(bucket_set, 30.0, "one"), arrivals)
            arrivals.check(await asyncio.wait_for(transfer, 240))
            print(f"nccl: {bucket_set.nbytes / (time.perf_counter() - began) / 1e9:.2f} GB/s, checks included")


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_receiver_that_dies_or_stops_amid_a_round_leaves_the_learner_as_it_was(
    tmp_path: Path, end: signal.Signals
) -> None:
    torch.cuda.set_device(0)
    async with stopping_receiver(NCCL) as (process, start), local_learner(NCCL, tmp_path) as learner:
        nccl = offered(learner)
        nccl._expected, nccl._window_s, nccl._timeout_s = {"stops"}, DEADLINE_S, STALL_S
        bucket_set = BucketSet.full(learner.publish(0, rows=300_000))
        await start(learner)
        # It stops itself with its first bucket under way.
        await until(lambda: "T (stopped)" in Path(f"/proc/{process.pid}/status").read_text())
        process.send_signal(end)
        await until(lambda: nccl._running is None)
        # Longer than NCCL's watchdog takes to look; this process, in which the learner would train, is still here.
        await asyncio.sleep(2 * STALL_S)
        assert torch.ones(4, device="cuda").sum().item() == 4
        verified = await Receiver("another").get(learner, bucket_set, DEADLINE_S)
        assert verified.transport == "grpc"
