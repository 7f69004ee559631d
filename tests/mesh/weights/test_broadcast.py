"""One group of a broadcast: every call ends in time, and nothing that becomes of the group ends the process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore

from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.weights.broadcast import BroadcastBackend, BroadcastGroup, BroadcastRank

CPU = torch.device("cpu")


def group(store: HashStore, rank: int, timeout_s: float, backend: BroadcastBackend = "gloo") -> BroadcastGroup:
    place = BroadcastRank(rank, size=2, host="127.0.0.1", device=CPU)
    return BroadcastGroup(backend, store, "1-1", place, timeout_s=timeout_s)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def pair(threads: ThreadPoolExecutor, timeout_s: float) -> list[BroadcastGroup]:
    """Two members that have met."""
    store = HashStore()
    members = [group(store, rank, timeout_s) for rank in range(2)]
    for meeting in [threads.submit(member.begin_round) for member in members]:
        meeting.result(180)
    return members


def test_a_member_that_takes_no_part_ends_the_bucket_in_time(threads: ThreadPoolExecutor) -> None:
    sender, receiver = pair(threads, 0.5)
    work = receiver.start_bucket(torch.zeros(1 << 20, dtype=torch.uint8))
    # gloo has the same timeout, and may be first.
    with pytest.raises(WeightsError, match=r"a bucket did not get through: (no progress for 0\.5 s|.*500ms)"):
        receiver.finish_bucket(work)
    for member in (sender, receiver):
        member.close()


def test_leaving_ends_what_is_under_way(threads: ThreadPoolExecutor) -> None:
    sender, receiver = pair(threads, 5.0)
    waiting = threading.Event()

    def wait() -> None:
        work = receiver.start_bucket(torch.zeros(1 << 20, dtype=torch.uint8))
        waiting.set()
        receiver.finish_bucket(work)

    ended = threads.submit(wait)
    assert waiting.wait(180)
    receiver.close()
    with pytest.raises(WeightsError, match="a bucket did not get through: the group has been left"):
        ended.result(180)
    sender.close()


def test_what_an_abort_has_ended_is_not_taken_for_sent(threads: ThreadPoolExecutor) -> None:
    members = pair(threads, 20.0)
    works = [member.start_bucket(torch.zeros(8, dtype=torch.uint8)) for member in members]
    members[0].finish_bucket(works[0])
    members[1].close()
    with pytest.raises(WeightsError, match="the group has been left"):
        members[1].finish_bucket(works[1])
    members[0].close()


def test_an_nccl_group_is_made_so_that_its_trouble_ends_no_process(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch reads both variables in the constructor alone; the groups that train keep their own."""
    made: list[tuple[str | None, str | None, float]] = []

    class Nccl:
        class Options:
            _timeout: Any = None

        def __init__(self, store: PrefixStore, rank: int, size: int, options: Any) -> None:
            names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING")
            made.append((*map(os.environ.get, names), options._timeout.total_seconds()))  # type: ignore[arg-type]

        def abort(self) -> None: ...

    monkeypatch.setattr("torch.distributed.ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    monkeypatch.delenv("TORCH_NCCL_ENABLE_MONITORING", raising=False)
    member = group(HashStore(), 0, 20.0, "nccl")
    member._connect()
    assert made == [("2", "0", 200.0)]
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    assert "TORCH_NCCL_ENABLE_MONITORING" not in os.environ
