"""CUDA transports: the handle on the wire and refusals anywhere; bytes from another process where there is a GPU."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from generators.weights.transports.cuda_ipc import CudaIpc
from learner.weights import offers
from mesh.errors import WeightsError
from mesh.hosts import host_id
from mesh.versions import PolicyVersion
from mesh.weights import Wanted
from mesh.weights.cuda_handle import CudaHandle
from protos import weights_pb2
from tests.generators.weights.transports.cases import GPU_CASES
from tests.generators.weights.transports.world import Arrivals, remote_learner

HANDLE = CudaHandle("GPU-0", "00ff", 1 << 20, 512, "2f746f", 3, "aa", event_needed=True)


def wanted(address: str, host: str = "") -> Wanted:
    offer = weights_pb2.Offer(transport="cuda_ipc", address=address, host_id=host or host_id())
    return Wanted(PolicyVersion(1, 0), None, [weights_pb2.BucketEntry(nbytes=1 << 20)], [offer])


def test_a_handle_comes_back_as_it_was_sent() -> None:
    assert CudaHandle.from_address(HANDLE.address()) == HANDLE


@pytest.mark.parametrize(
    "change",
    [{"block": "not hex"}, {"nbytes": -1}, {"nbytes": "8"}, {"offset": True}, {"device": 0}, {"more": 1}, {"event": 7}],
)
def test_what_is_no_handle_is_refused(change: dict[str, object]) -> None:
    text = json.dumps(json.loads(HANDLE.address()) | change)
    with pytest.raises(WeightsError, match="cannot be read"):
        CudaHandle.from_address(text)
    assert "cannot be read" in CudaIpc(host_id()).refusal(wanted(text))


def test_refusals_say_what_is_missing() -> None:
    receiver = CudaIpc(host_id())
    assert receiver.refusal(Wanted(PolicyVersion(1, 0), None, [])) == "the learner offers no CUDA memory"
    assert receiver.refusal(wanted(HANDLE.address(), "elsewhere")) == "the learner is on another host"
    assert receiver.refusal(wanted(HANDLE.address())) == "the learner's CUDA device is not visible here"
    small = CudaHandle("GPU-0", "00", 10, 0, "00", 0, "00", event_needed=False)
    assert "10 bytes" in receiver.refusal(wanted(small.address()))


def test_a_learner_without_cuda_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(WeightsError, match="no CUDA device"):
        offers.CudaIpc()


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=lambda case: case.name)
async def test_bytes_come_whole_from_another_process(case, tmp_path: Path) -> None:
    import torch

    if case.name == "nccl":
        if torch.cuda.device_count() < 2:
            pytest.skip("nccl needs a second CUDA device: it refuses two ranks on one")
        torch.cuda.set_device(1)
    async with remote_learner(case, tmp_path) as learner:
        bytes_wanted = Wanted.full(learner.manifest)
        receiver = learner.receiver()
        assert receiver.refusal(bytes_wanted) == ""
        for _ in range(2):
            arrivals, began = Arrivals(bytes_wanted), time.perf_counter()
            transfer = receiver.receive(learner.fetch(bytes_wanted, 30.0, "one"), arrivals)
            arrivals.check(await asyncio.wait_for(transfer, 60))
            print(f"{case.name}: {bytes_wanted.nbytes / (time.perf_counter() - began) / 1e9:.2f} GB/s, checks included")
