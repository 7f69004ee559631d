"""A broadcast from this process, rank 0, to the server's: for a server on another host.

Over gloo where the generator has no CUDA device, else over nccl, for which that device must not be one of the
server's. The group is made once and kept; the names under which its members meet are those that torch's own group
constructor uses, by which the server makes its side.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from generators.engines.base import EngineError
from generators.engines.sglang.transfers.base import UPDATE_S, DtypeOf, Staged, Transfer, begin
from mesh.errors import WeightsError
from mesh.weights.broadcast import own_host

if TYPE_CHECKING:
    from generators.engines.sglang.client import Client

_JOIN_S = 120.0


class StagedTensors(Staged):
    """Tensors to be sent.

    Attributes:
        named: (name, tensor in the server's dtype), where it was; empty after `discard`.
    """

    def __init__(self, named: list[tuple[str, torch.Tensor]]) -> None:
        self.named = named

    def discard(self) -> None:
        """See Staged."""
        self.named = []


class DistributedTransfer(Transfer):
    """`/update_weights_from_distributed`.

    Args:
        dtype_of: in which a tensor is sent.
        ranks: its processes.
        session: whether it wants a begin and an end.
        device: from which is sent.
    """

    def __init__(self, dtype_of: DtypeOf, ranks: int, *, session: bool, device: torch.device) -> None:
        self._dtype_of = dtype_of
        self._ranks = ranks
        self._session = session
        self._device = device
        self._backend = "nccl" if device.type == "cuda" else "gloo"
        self._name = f"rollmesh-{uuid.uuid4().hex}"
        self._store: TCPStore | None = None
        self._group: Any = None

    def stage(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Staged:
        """See Transfer."""
        try:
            named = [(name, tensor.to(self._dtype_of(tensor)).contiguous()) for name, tensor in tensors]
        except (RuntimeError, MemoryError) as error:
            raise WeightsError(f"no memory for new weights: {error}") from error
        return StagedTensors(named)

    async def load(self, client: Client, staged: StagedTensors, label: str) -> None:
        """See Transfer."""
        if self._group is None:
            await self._join(client)
        if self._session:
            await begin(client)
        body = {
            "names": [name for name, _ in staged.named],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in staged.named],
            "shapes": [list(tensor.shape) for _, tensor in staged.named],
            "group_name": self._name,
            "flush_cache": False,
            "weight_version": label,
        }
        sent = asyncio.to_thread(self._send, [tensor for _, tensor in staged.named])
        await _both(client.post("/update_weights_from_distributed", body, UPDATE_S), sent)
        if self._session:
            await client.post("/end_weight_update", timeout_s=UPDATE_S)

    async def close(self) -> None:
        """See Transfer."""
        if self._group is not None:
            self._group.abort()
        self._group = self._store = None

    async def _join(self, client: Client) -> None:
        host, port = _place(client.address)
        mine = own_host(f"{host}:{port}")
        timeout = timedelta(seconds=_JOIN_S)
        try:
            self._store = TCPStore(mine, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        except RuntimeError as error:
            raise EngineError(f"no rendezvous for the SGLang server can be opened at {mine}: {error}") from error
        body = {
            "master_address": mine,
            "master_port": self._store.port,
            "rank_offset": 1,
            "world_size": 1 + self._ranks,
            "group_name": self._name,
            "backend": self._backend,
        }
        made = asyncio.to_thread(self._make, self._store, mine)
        _, self._group = await _both(client.post("/init_weights_update_group", body, _JOIN_S), made)

    def _make(self, store: TCPStore, host: str) -> Any:
        # The prefixes of torch.distributed's constructor of groups, and of SGLang's before it.
        place = PrefixStore(f"{self._device.type}/", PrefixStore(f"{self._name}/", PrefixStore(self._name, store)))
        timeout = timedelta(seconds=UPDATE_S)
        if self._backend == "nccl":
            from torch.distributed import ProcessGroupNCCL

            torch.cuda.set_device(self._device)
            nccl = ProcessGroupNCCL.Options()
            nccl._timeout = timeout
            return ProcessGroupNCCL(place, 0, 1 + self._ranks, nccl)
        gloo = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in torch's stubs
        gloo._devices = [ProcessGroupGloo.create_device(hostname=host)]
        gloo._timeout = timeout
        return ProcessGroupGloo(place, 0, 1 + self._ranks, gloo)

    def _send(self, tensors: list[torch.Tensor]) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        for tensor in tensors:
            # On the device is one at a time.
            self._group.broadcast([tensor.to(self._device)], options).wait()
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
            torch.cuda.empty_cache()


async def _both(call: Any, ours: Any) -> tuple[Any, Any]:
    """Both sides of one collective; where one fails the other is not waited for.

    Raises:
        EngineError: one has failed.
    """
    tasks = [asyncio.ensure_future(call), asyncio.ensure_future(ours)]
    try:
        first, second = await asyncio.gather(*tasks)
    except RuntimeError as error:
        raise EngineError(f"the broadcast to the SGLang server failed: {error}") from error
    finally:
        for task in tasks:
            task.cancel()
    return first, second


def _place(address: str) -> tuple[str, int]:
    from urllib.parse import urlsplit

    parts = urlsplit(address)
    return parts.hostname or "127.0.0.1", parts.port or 80
