"""One broadcast group: rank 0 sends buckets, all others receive them. Learner and generators share this code.

Invariants: the group is separate from torch.distributed's default group, which belongs to training. Every call ends
within its timeout, whatever the others do. A group in which anything failed is of no more use; closing it, from any
thread, ends the calls that others have in progress. The training process survives any failure of the group.

A round (one version) begins in the store: all members report their presence, and rank 0 answers whether the round takes
place. So a member that has died since is found before any other waits for it in a collective.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store, Work

from rollmesh.mesh.errors import WeightsError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend

BroadcastBackend = Literal["gloo", "nccl"]
# Buckets under way at a time: the next is prepared while the first is sent.
DEPTH = 2
# A step that stands still for so long holds up all others, which can use grpc instead.
LONGEST_STALL_S = 20.0
_PROCEED = "go"
# A bucket takes longer, and no event reports its end: torch's own wait has no deadline without consequences.
_LOOK_EVERY_S = 0.001
# Beyond every deadline of ours, so that NCCL's never comes first.
_NCCL_PATIENCE = 10
# torch reads these where a group is made. By default an error or a slow abort of any one group ends the process. In a
# group that trains nothing is left to save then; here all bytes can still be had over grpc.
_NCCL_ENVIRONMENT = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_ENABLE_MONITORING": "0"}


@dataclass(frozen=True, slots=True)
class BroadcastRank:
    """The place of one process in a group.

    Attributes:
        rank: of this process; 0 sends.
        size: members, rank 0 included.
        host: address of this host that the others reach.
        device: where buckets are sent from and received: the CPU for gloo, a CUDA device for nccl.
    """

    rank: int
    size: int
    host: str
    device: torch.device


class BroadcastGroup:
    """This process's side of a group. Belongs to one thread, apart from `close`.

    Args:
        backend: gloo or nccl.
        store: in which all members meet.
        name: of the group; no other has ever used it.
        place: of this process.
        timeout_s: of every step, `LONGEST_STALL_S` at most: a member that does not come, a bucket that stands still.
    """

    def __init__(
        self, backend: BroadcastBackend, store: Store, name: str, place: BroadcastRank, *, timeout_s: float
    ) -> None:
        self.backend = backend
        self.name = name
        self.device = place.device
        self.size = place.size
        self._rank = place.rank
        self._host = place.host
        self._store = PrefixStore(name, store)
        self._timeout = timedelta(seconds=min(timeout_s, LONGEST_STALL_S))
        self._round = 0
        self._lock = threading.Lock()
        self._closed = False
        self._group: Backend | None = None

    def begin_round(self) -> None:
        """Begins a round: all meet, and the first time they connect.

        Raises:
            WeightsError: a member did not come, or rank 0 has called the round off.
        """
        self._round += 1
        if self.device.type == "cuda":
            # Set for this thread: nccl and copies use its current device.
            torch.cuda.set_device(self.device)
        with self._typed_errors("the members do not meet"):
            if self._rank == 0:
                self._wait_for_members()
            else:
                self._store.set(self._presence_key(self._rank), "")
                self._store.wait([self._verdict_key()], self._timeout)
                if (verdict := self._store.get(self._verdict_key()).decode()) != _PROCEED:
                    raise WeightsError(f"{self.backend} broadcast {self.name} does not take place: {verdict}")
            if self._group is None:
                group = self._connect()
                with self._lock:
                    self._group, closed = group, self._closed
                if closed:
                    group.abort()

    def missing_ranks(self) -> list[int]:
        """Ranks that have not come to the round; for rank 0, after `begin` has failed."""
        return [rank for rank in range(1, self.size) if not self._store.check([self._presence_key(rank)])]

    def lagging_ranks(self) -> list[int]:
        """Ranks that have got fewer buckets of the round than others; for rank 0, after the round has failed."""
        with self._typed_errors("the members' progress is not known"):
            got = {rank: self._store.add(self._progress_key(rank), 0) for rank in range(1, self.size)}
        return [rank for rank, buckets in got.items() if buckets < max(got.values())]

    def start_bucket(self, tensor: torch.Tensor) -> Work:
        """Starts with a bucket; at most `DEPTH` are under way.

        Args:
            tensor: uint8 on `device`, of the same length everywhere; neither read nor written by others until `finish`.

        Raises:
            WeightsError: the group is broken.
        """
        assert self._group is not None, "begin() comes first"
        with self._typed_errors("a bucket cannot be sent"):
            return start_broadcast(self._group, tensor, self._timeout)

    def finish_bucket(self, work: Work) -> None:
        """Waits until a bucket is through.

        Raises:
            WeightsError: it did not get through in time, or a member has left.
        """
        with self._typed_errors("a bucket did not get through"):
            wait_for_collective(work, self._timeout, lambda: self._closed)
            if self.device.type == "cuda":
                # `wait` orders streams only.
                torch.cuda.current_stream().synchronize()
            if self._rank:
                self._store.add(self._progress_key(self._rank), 1)

    def close(self) -> None:
        """Leaves; calls that are under way here and at the others end with errors."""
        with self._lock:
            done, self._closed = self._closed, True
            group = self._group
        if group is not None and not done:
            group.abort()

    def _wait_for_members(self) -> None:
        members = [self._presence_key(rank) for rank in range(1, self.size)]
        verdict = _PROCEED
        try:
            self._store.wait(members, self._timeout)
        except RuntimeError as error:
            verdict = f"ranks {self.missing_ranks()} of {self.size} did not come"
            raise WeightsError(f"{self.backend} broadcast {self.name} does not take place: {verdict}") from error
        finally:
            self._store.set(self._verdict_key(), verdict)
            self._delete_round(self._round - 1)

    def _connect(self) -> Backend:
        return connect_group(
            self.backend, self._store, rank=self._rank, size=self.size, timeout=self._timeout, host=self._host
        )

    def _delete_round(self, finished: int) -> None:
        """Removes the keys of a round that all members have finished."""
        members = range(1, self.size)
        kinds = [f"{kind}-{rank}" for kind in ("here", "got") for rank in members]
        for key in (*kinds, "said"):
            self._store.delete_key(f"round-{finished}/{key}")

    def _presence_key(self, rank: int) -> str:
        return f"round-{self._round}/here-{rank}"

    def _progress_key(self, rank: int) -> str:
        return f"round-{self._round}/got-{rank}"

    def _verdict_key(self) -> str:
        return f"round-{self._round}/said"

    @contextmanager
    def _typed_errors(self, what: str) -> Iterator[None]:
        # torch raises RuntimeError and its children for all that can happen to a group.
        try:
            yield
        except RuntimeError as error:
            first_line = str(error).partition("\n")[0]
            raise WeightsError(f"{self.backend} broadcast {self.name}: {what}: {first_line}") from error


def connect_group(
    backend: BroadcastBackend, store: Store, *, rank: int, size: int, timeout: timedelta, host: str
) -> Backend:
    """Makes a group that ends no process when it fails; waits until all members are there.

    Args:
        backend: gloo or nccl, which takes the present CUDA device.
        store: in which its members meet, and no others.
        rank: of this process.
        size: members.
        timeout: of gloo's steps, and of the meeting.
        host: address of this host that the others reach.

    Raises:
        RuntimeError: a member did not come.
    """
    if backend == "nccl":
        from torch.distributed import ProcessGroupNCCL

        nccl = ProcessGroupNCCL.Options()
        nccl._timeout = timeout * _NCCL_PATIENCE
        with _environment(_NCCL_ENVIRONMENT):
            return ProcessGroupNCCL(store, rank, size, nccl)
    gloo = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in torch's stubs
    gloo._devices = [ProcessGroupGloo.create_device(hostname=host)]
    gloo._timeout = timeout
    gloo._threads = DEPTH
    return ProcessGroupGloo(store, rank, size, gloo)


def start_broadcast(group: Backend, tensor: torch.Tensor, timeout: timedelta) -> Work:
    """Starts a broadcast of a tensor that rank 0 sends and the others receive in place.

    Raises:
        RuntimeError: the group is broken.
    """
    options = BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    options.timeout = timeout
    options.asyncOp = True
    return group.broadcast([tensor], options)  # type: ignore[attr-defined]  # missing in torch's stubs


def wait_for_collective(work: Work, timeout: timedelta, left: Callable[[], bool]) -> None:
    """Waits for a collective; leaves it as it is if it takes too long.

    NCCL's own wait would mark it as overdue, and its watchdog would end the process for that.

    Args:
        work: of the collective.
        timeout: without an end of it.
        left: whether the group has been aborted here; what that ends may look like what has been sent.

    Raises:
        RuntimeError: it took too long, went wrong, or the group has been left.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    while not work.is_completed() and not left():
        if time.monotonic() > deadline:
            raise RuntimeError(f"no progress for {timeout.total_seconds():g} s")
        time.sleep(_LOOK_EVERY_S)
    if left():
        raise RuntimeError("the group has been left")
    # Returns at once, and raises what went wrong.
    work.wait()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets variables of this process for a moment."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Staging:
    """`DEPTH` buffers on a group's device, used in turn; bytes go through pinned memory where that is not the CPU.

    Args:
        device: of the group.
        largest: bytes of the largest bucket.
    """

    def __init__(self, device: torch.device, largest: int) -> None:
        self.largest = largest
        self._host = [torch.empty(largest, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(DEPTH)]
        self._device = self._host
        if device.type != "cpu":
            self._device = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(DEPTH)]

    def buffer(self, index: int, nbytes: int) -> torch.Tensor:
        """The buffer of a bucket; free once the bucket `DEPTH` before is done with."""
        return self._device[index % DEPTH][:nbytes]

    def copy_in(self, index: int, data: memoryview) -> torch.Tensor:
        """Fills a bucket's buffer."""
        host, device = self._host[index % DEPTH][: len(data)], self.buffer(index, len(data))
        host.numpy().data[:] = data
        if device is not host:
            device.copy_(host)
        return device

    def copy_out(self, index: int, target: memoryview) -> None:
        """Empties a bucket's buffer."""
        host, device = self._host[index % DEPTH][: len(target)], self.buffer(index, len(target))
        host.copy_(device)
        target[:] = host.numpy().data
