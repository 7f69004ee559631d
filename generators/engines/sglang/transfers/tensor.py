"""Buckets in shared memory, for a server on this host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rollmesh.generators.engines.sglang.transfers.interface import (
    UPDATE_S,
    DtypeOf,
    ServerTransfer,
    StagedWeights,
    begin,
)
from rollmesh.generators.engines.sglang.transfers.sharing import Bucket, filled_bucket
from rollmesh.mesh.errors import WeightsError

if TYPE_CHECKING:
    import torch

    from rollmesh.generators.engines.sglang.http_client import HttpClient

BUCKET_BYTES = 512 * 2**20


def no_room(error: Exception) -> WeightsError:
    """The error of memory that cannot be had."""
    return WeightsError(
        f"no room in shared memory for new weights: {error}", hint="make /dev/shm larger, or transfer: disk"
    )


class StagedBuckets(StagedWeights):
    """Shared memory, full of weights.

    Attributes:
        buckets: in order; empty after `discard`.
    """

    def __init__(self, buckets: list[Bucket]) -> None:
        self.buckets = buckets

    def discard(self) -> None:
        """See Staged."""
        self.buckets = []


class TensorTransfer(ServerTransfer):
    """`/update_weights_from_tensor` in its form `flattened_bucket`.

    Args:
        dtype_of: in which a tensor is sent.
        ranks: processes that each take all of it.
        session: whether the server needs a begin and an end.
    """

    def __init__(self, dtype_of: DtypeOf, ranks: int, *, session: bool) -> None:
        self._dtype_of = dtype_of
        self._ranks = ranks
        self._session = session

    def stage(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> StagedWeights:
        """See ServerTransfer."""
        buckets: list[Bucket] = []
        try:
            buckets.extend(filled_bucket(group, self._dtype_of) for group in self._groups(tensors))
        except (RuntimeError, MemoryError) as error:
            raise no_room(error) from error
        return StagedBuckets(buckets)

    async def load(self, client: HttpClient, staged: StagedBuckets, label: str) -> None:
        """See ServerTransfer."""
        if self._session:
            await begin(client)
        for index, bucket in enumerate(staged.buckets):
            last = index == len(staged.buckets) - 1
            body = {
                "serialized_named_tensors": [bucket.payload() for _ in range(self._ranks)],
                "load_format": "flattened_bucket",
                "flush_cache": False,
                "weight_version": label if last else None,
            }
            await client.post("/update_weights_from_tensor", body, UPDATE_S)
        if self._session:
            await client.post("/end_weight_update", timeout_s=UPDATE_S)

    def _groups(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterable[list[tuple[str, torch.Tensor]]]:
        group: list[tuple[str, torch.Tensor]] = []
        size = 0
        for name, tensor in tensors:
            nbytes = tensor.numel() * self._dtype_of(tensor).itemsize
            if group and size + nbytes > BUCKET_BYTES:
                yield group
                group, size = [], 0
            group.append((name, tensor))
            size += nbytes
        if group:
            yield group
