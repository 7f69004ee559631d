"""One broadcast group: rank 0 sends buckets, all others receive them. Learner and generators share this code.

Invariants: the group is its own, apart from torch.distributed's default group, which belongs to whoever trains; every
call ends within the timeout that it is given, whatever the others do; a group in which anything failed is of no more
use to anybody, and closing it (from any thread) ends the calls that others have under way; whatever becomes of it, the
process that trains lives on.

A round (one version) begins with all members saying through the store that they are there, and rank 0 answering
whether it takes place, so that one that has died since is found before anybody waits for it in a collective.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
# A step that does not get on for so long holds up all others, who have grpc to turn to.
LONGEST_STALL_S = 20.0
_GO = "go"
# A bucket takes longer, and no event says that it is through: torch's own wait has no deadline without consequences.
_LOOK_EVERY_S = 0.001
# Beyond every deadline of ours, so that none of NCCL's strikes.
_NCCL_PATIENCE = 10
# torch reads these where a group is made. By default an error or a slow abort of any one group ends the process: in a
# group that trains nothing is left to save then, here all bytes can still be had over grpc.
_NCCL_ENVIRONMENT = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_ENABLE_MONITORING": "0"}


class BroadcastGroup:
    """This process's side of a group. Belongs to one thread, apart from `close`.

    Args:
        backend: gloo or nccl.
        store: in which all members meet.
        name: of the group; no other has ever used it.
        rank: of this process; 0 sends.
        size: members, rank 0 included.
        timeout_s: of every step, `LONGEST_STALL_S` at most: a member that does not come, a bucket that does not get on.
        host: address of this host that the others reach.
        device: where buckets are sent from and received: the CPU for gloo, a CUDA device for nccl.
    """

    def __init__(
        self,
        backend: BroadcastBackend,
        store: Store,
        name: str,
        *,
        rank: int,
        size: int,
        timeout_s: float,
        host: str,
        device: torch.device,
    ) -> None:
        self.backend = backend
        self.device = device
        self.name = name
        self.size = size
        self._rank = rank
        self._store = PrefixStore(name, store)
        self._timeout = timedelta(seconds=min(timeout_s, LONGEST_STALL_S))
        self._host = host
        self._round = 0
        self._lock = threading.Lock()
        self._closed = False
        self._group: Backend | None = None

    def begin(self) -> None:
        """Begins a round: all meet, and the first time they connect.

        Raises:
            WeightsError: somebody did not come, or rank 0 has called it off.
        """
        self._round += 1
        if self.device.type == "cuda":
            # Of this thread: nccl and copies go by the present device.
            torch.cuda.set_device(self.device)
        with self._errors("the members do not meet"):
            if self._rank == 0:
                self._gather()
            else:
                self._store.set(self._here(self._rank), "")
                self._store.wait([self._said()], self._timeout)
                if (said := self._store.get(self._said()).decode()) != _GO:
                    raise WeightsError(f"{self.backend} broadcast {self.name} does not take place: {said}")
            if self._group is None:
                group = self._connect()
                with self._lock:
                    self._group, closed = group, self._closed
                if closed:
                    group.abort()

    def missing(self) -> list[int]:
        """Ranks that have not come to the round; for rank 0, after `begin` has failed."""
        return [rank for rank in range(1, self.size) if not self._store.check([self._here(rank)])]

    def behind(self) -> list[int]:
        """Ranks that have got fewer buckets of the round than others; for rank 0, after the round has failed."""
        with self._errors("the members' progress is not known"):
            got = {rank: self._store.add(self._got(rank), 0) for rank in range(1, self.size)}
        return [rank for rank, buckets in got.items() if buckets < max(got.values())]

    def start(self, tensor: torch.Tensor) -> Work:
        """Starts with a bucket; at most `DEPTH` are under way.

        Args:
            tensor: uint8 on `device`, of the same length everywhere; neither read nor written by others until `finish`.

        Raises:
            WeightsError: the group is broken.
        """
        assert self._group is not None, "begin() comes first"
        with self._errors("a bucket cannot be sent"):
            return self._group.broadcast([tensor], broadcast_options(self._timeout))  # type: ignore[attr-defined]

    def finish(self, work: Work) -> None:
        """Waits until a bucket is through.

        Raises:
            WeightsError: it did not get through in time, or somebody has left.
        """
        with self._errors("a bucket did not get through"):
            wait_through(work, self._timeout, lambda: self._closed)
            if self.device.type == "cuda":
                # `wait` orders streams only.
                torch.cuda.current_stream().synchronize()
            if self._rank:
                self._store.add(self._got(self._rank), 1)

    def close(self) -> None:
        """Leaves; calls that are under way here and at the others end with errors."""
        with self._lock:
            done, self._closed = self._closed, True
            group = self._group
        if group is not None and not done:
            group.abort()

    def _gather(self) -> None:
        members = [self._here(rank) for rank in range(1, self.size)]
        said = _GO
        try:
            self._store.wait(members, self._timeout)
        except RuntimeError as error:
            said = f"ranks {self.missing()} of {self.size} did not come"
            raise WeightsError(f"{self.backend} broadcast {self.name} does not take place: {said}") from error
        finally:
            self._store.set(self._said(), said)
            self._forget(self._round - 1)

    def _connect(self) -> Backend:
        return connect_group(
            self.backend, self._store, rank=self._rank, size=self.size, timeout=self._timeout, host=self._host
        )

    def _forget(self, finished: int) -> None:
        """Removes the keys of a round that everybody has been through."""
        members = range(1, self.size)
        kinds = [f"{kind}-{rank}" for kind in ("here", "got") for rank in members]
        for key in (*kinds, "said"):
            self._store.delete_key(f"round-{finished}/{key}")

    def _here(self, rank: int) -> str:
        return f"round-{self._round}/here-{rank}"

    def _got(self, rank: int) -> str:
        return f"round-{self._round}/got-{rank}"

    def _said(self) -> str:
        return f"round-{self._round}/said"

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        # torch raises RuntimeError and its children for all that can happen to a group.
        try:
            yield
        except RuntimeError as error:
            first_line = str(error).partition("\n")[0]
            raise WeightsError(f"{self.backend} broadcast {self.name}: {what}: {first_line}") from error


def connect_group(
    backend: BroadcastBackend, store: Store, *, rank: int, size: int, timeout: timedelta, host: str
) -> Backend:
    """Makes a group whose trouble ends no process; waits until all members are there.

    Args:
        backend: gloo or nccl, which takes the present CUDA device.
        store: in which its members meet, and no others.
        rank: of this process.
        size: members.
        timeout: of gloo's steps, and of the meeting.
        host: address of this host that the others reach.

    Raises:
        RuntimeError: somebody did not come.
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


def broadcast_options(timeout: timedelta) -> BroadcastOptions:
    """Of a bucket that rank 0 sends."""
    options = BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    options.timeout = timeout
    options.asyncOp = True
    return options


def wait_through(work: Work, timeout: timedelta, left: Callable[[], bool]) -> None:
    """Waits for a collective, and leaves it as it is where it takes too long.

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

    def put(self, index: int, data: memoryview) -> torch.Tensor:
        """Fills a bucket's buffer."""
        host, device = self._host[index % DEPTH][: len(data)], self.buffer(index, len(data))
        host.numpy().data[:] = data
        if device is not host:
            device.copy_(host)
        return device

    def take(self, index: int, target: memoryview) -> None:
        """Empties a bucket's buffer."""
        host, device = self._host[index % DEPTH][: len(target)], self.buffer(index, len(target))
        host.copy_(device)
        target[:] = host.numpy().data
