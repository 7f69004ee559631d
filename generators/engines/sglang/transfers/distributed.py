"""A broadcast from this process, rank 0, to the server's: for a server on another host.

Over gloo where the generator has no CUDA device, else over nccl, for which that device must not be one of the
server's. The names under which its members meet are those that torch's own group constructor uses, by which the server
makes its side.

Invariants: the server says whether new weights are in place. A process of it loads none before it has received all of
them, so that a broadcast that breaks off leaves it the former ones. Only the first of several processes is heard: the
weights of the others are not known. The group is kept from one update to the next. One in which anything failed is left
by both sides, which ends what either has under way, and the next update makes another.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
from torch.distributed import PrefixStore, TCPStore

from rollmesh.generators.engines.sglang.http_client import RefusedError
from rollmesh.generators.engines.sglang.transfers.interface import (
    UPDATE_S,
    DtypeOf,
    ServerTransfer,
    StagedWeights,
    begin,
)
from rollmesh.mesh.addresses import join_address
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.weights.broadcast import BroadcastBackend, connect_group, start_broadcast, wait_for_collective
from rollmesh.mesh.weights.rendezvous import open_store, own_host

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend

    from rollmesh.generators.engines.sglang.http_client import HttpClient

log = logging.getLogger(__name__)

# Seconds in which all members come, and in which one tensor gets through.
STEP_S = 120.0
# So begins what a server says that has received no set, and therefore loaded none.
_NOT_RECEIVED = "Failed to receive weights"
_INTACT = "the former weights stay in service, and the next version is sent to a new group"


class _Group:
    """A broadcast group with one server."""

    def __init__(self, backend: BroadcastBackend, device: torch.device) -> None:
        self.name = f"rollmesh-{uuid.uuid4().hex}"
        self._backend = backend
        self._device = device
        self._store: TCPStore | None = None
        self._group: Backend | None = None
        self._left = False

    def open(self, host: str) -> int:
        """Opens the store in which its members meet, on this address; returns the port.

        Raises:
            WeightsError: it cannot be bound.
        """
        self._store = open_store(host, STEP_S)
        return self._store.port

    def connect(self, host: str, size: int) -> None:
        """Waits until all members are there.

        Raises:
            WeightsError: a member did not come.
        """
        assert self._store is not None, "it is open"
        # The prefixes of torch.distributed's constructor of groups, and of SGLang's before it.
        prefix, store = f"{self._device.type}/", PrefixStore(self.name, self._store)
        place = PrefixStore(prefix, PrefixStore(f"{self.name}/", store))
        try:
            self._use_device()
            group = connect_group(self._backend, place, rank=0, size=size, timeout=timedelta(seconds=STEP_S), host=host)
        except RuntimeError as error:
            raise WeightsError(f"the members do not meet: {_first_line(error)}") from error
        self._group = group
        if self._left:
            group.abort()

    def send(self, tensors: Iterable[torch.Tensor]) -> None:
        """Broadcasts them in sequence: on the device is one at a time.

        Raises:
            WeightsError: one did not get through in time, or a member has left.
        """
        assert self._group is not None, "it is connected"
        timeout = timedelta(seconds=STEP_S)
        try:
            self._use_device()
            for tensor in tensors:
                work = start_broadcast(self._group, tensor.to(self._device), timeout)
                wait_for_collective(work, timeout, lambda: self._left)
            if self._device.type == "cuda":
                torch.cuda.current_stream().synchronize()
                torch.cuda.empty_cache()
        except RuntimeError as error:
            raise WeightsError(f"a tensor did not get through: {_first_line(error)}") from error

    def leave(self) -> None:
        """Ends the current transfer, here and at the server; any thread, and a second call does nothing."""
        done, self._left = self._left, True
        if self._group is not None and not done:
            self._group.abort()

    def _use_device(self) -> None:
        # The device of this thread: nccl and copies go by the present one.
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)


class StagedTensors(StagedWeights):
    """Tensors to be sent.

    Attributes:
        named: (name, tensor in the server's dtype), where it was; empty after `discard`.
    """

    def __init__(self, named: list[tuple[str, torch.Tensor]]) -> None:
        self.named = named

    def discard(self) -> None:
        """See Staged."""
        self.named = []


class DistributedTransfer(ServerTransfer):
    """`/update_weights_from_distributed`.

    Args:
        dtype_of: gives the dtype in which a tensor travels.
        ranks: processes of the server.
        session: whether the server needs a begin and an end.
        device: holds the tensors that this side sends.
    """

    def __init__(self, dtype_of: DtypeOf, ranks: int, *, session: bool, device: torch.device) -> None:
        self._dtype_of = dtype_of
        self._ranks = ranks
        self._session = session
        self._device = device
        self._backend: BroadcastBackend = "nccl" if device.type == "cuda" else "gloo"
        self._group: _Group | None = None

    def stage(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> StagedWeights:
        """See ServerTransfer."""
        try:
            named = [(name, tensor.to(self._dtype_of(tensor)).contiguous()) for name, tensor in tensors]
        except (RuntimeError, MemoryError) as error:
            raise WeightsError(f"no memory for new weights: {error}") from error
        return StagedTensors(named)

    async def load(self, client: HttpClient, staged: StagedTensors, label: str) -> None:
        """See ServerTransfer."""
        group = self._group or await self._join(client)
        if self._session:
            await begin(client)
        failure = await self._broadcast(client, group, staged, label)
        if self._session:
            await client.post("/end_weight_update", timeout_s=UPDATE_S)
        if failure:
            await self._leave_group(client)
            raise WeightsError(f"the broadcast to the SGLang server failed: {failure}", hint=_INTACT)

    async def close(self) -> None:
        """See ServerTransfer."""
        if self._group is not None:
            self._group.leave()
        self._group = None

    async def _broadcast(self, client: HttpClient, group: _Group, staged: StagedTensors, label: str) -> str:
        """The reason why the server has received nothing; empty where it serves these weights.

        Raises:
            EngineError: it is not known what it holds.
        """
        body = {
            "names": [name for name, _ in staged.named],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in staged.named],
            "shapes": [list(tensor.shape) for _, tensor in staged.named],
            "group_name": group.name,
            "flush_cache": False,
            "weight_version": label,
        }
        sending = asyncio.create_task(asyncio.to_thread(_send, group, [tensor for _, tensor in staged.named]))
        refusal = ""
        try:
            await client.post("/update_weights_from_distributed", body, UPDATE_S)
        except BaseException as error:
            # The sending thread would wait for the server.
            group.leave()
            if self._ranks > 1 or not isinstance(error, RefusedError) or _NOT_RECEIVED not in str(error):
                raise
            refusal = str(error)
        trouble = await sending
        if trouble and not refusal:
            log.warning("the server has all weights, the next ones are sent to a new group: %s", trouble)
            await self._leave_group(client)
        return "; ".join(filter(None, (trouble, refusal))) if refusal else ""

    async def _join(self, client: HttpClient) -> _Group:
        parts = urlsplit(client.address)
        mine = own_host(join_address(parts.hostname or "127.0.0.1", parts.port or 80))
        group = _Group(self._backend, self._device)
        body = {
            "master_address": mine,
            "master_port": group.open(mine),
            "rank_offset": 1,
            "world_size": 1 + self._ranks,
            "group_name": group.name,
            "backend": self._backend,
        }
        meeting = asyncio.to_thread(group.connect, mine, 1 + self._ranks)
        joined = client.post("/init_weights_update_group", body, STEP_S)
        try:
            await _wait_for_both(joined, meeting)
        except RefusedError as error:
            group.leave()
            raise WeightsError(f"the SGLang server joins no broadcast: {error}", hint=_INTACT) from error
        except BaseException:
            group.leave()
            raise
        self._group = group
        return group

    async def _leave_group(self, client: HttpClient) -> None:
        group, self._group = self._group, None
        assert group is not None, "it was used just now"
        group.leave()
        with suppress(RefusedError):
            await client.post("/destroy_weights_update_group", {"group_name": group.name})


def _send(group: _Group, tensors: Iterable[torch.Tensor]) -> str:
    """The reason why not all tensors were sent; empty where they were."""
    try:
        group.send(tensors)
    except WeightsError as error:
        # The server waits for the rest otherwise.
        group.leave()
        return str(error)
    return ""


async def _wait_for_both(*both: Coroutine[Any, Any, Any]) -> None:
    """Waits for both sides of a meeting; where one fails the other is not waited for."""
    tasks = [asyncio.ensure_future(side) for side in both]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
