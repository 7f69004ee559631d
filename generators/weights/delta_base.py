"""The host copy of the weights in service, to which deltas are applied.

Invariants: it is never changed: deltas are applied to a copy of it, so that it stays whole for its readers and for
another attempt. The outcome agrees with the full digests of the announced version, bucket by bucket, or is thrown away.
Where the deltas fail, for any reason, the caller fetches the full bytes.

Memory: the copy, and a second one from the first delta on until the swap.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from rollmesh.generators.weights.host_memory import allocate
from rollmesh.generators.weights.verified_transfer import VerifiedWeights
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.weights import BucketSet
from rollmesh.mesh.weights.delta import Span, apply_bucket, spans_of
from rollmesh.mesh.weights.delta_path import delta_path
from rollmesh.protos import weights_pb2

log = logging.getLogger(__name__)
# Buckets in work at a time. Decoding continues meanwhile, and needs the other cores.
_THREADS = 2


class DeltaBase:
    """The base of deltas; empty at first. Used in one event loop."""

    def __init__(self) -> None:
        self._manifest: weights_pb2.Manifest | None = None
        self._data = memoryview(b"")

    @property
    def nbytes(self) -> int:
        """Bytes kept."""
        return len(self._data)

    def keep(self, manifest: weights_pb2.Manifest, data: memoryview) -> None:
        """Makes verified weights the base of the next deltas, in place of those before."""
        self._manifest, self._data = manifest, data

    def drop(self) -> None:
        """Keeps nothing: the next version comes in full."""
        self._manifest, self._data = None, memoryview(b"")

    async def apply_deltas(
        self, manifest: weights_pb2.Manifest, receive: Callable[[BucketSet], Awaitable[VerifiedWeights]]
    ) -> VerifiedWeights | None:
        """The announced weights, by deltas.

        Args:
            manifest: as announced, checked.
            receive: brings the bytes of one delta.

        Returns:
            None where they have to be fetched in full: there is no path from here, it is not shorter, or it failed.
        """
        if self._manifest is None:
            return None
        deltas = delta_path(self._manifest, manifest)
        if not deltas:
            return None
        try:
            received = [await receive(BucketSet.of_delta(delta)) for delta in deltas]
            data = await _apply(self._data, manifest, deltas, received)
        except WeightsError as error:
            log.warning("version %d comes in full, its deltas failed: %s", manifest.policy.version, error.message)
            return None
        return replace(
            received[-1],
            data=data,
            nbytes=sum(delta.nbytes for delta in received),
            first_byte_ns=received[0].first_byte_ns,
            last_byte_ns=time.time_ns(),
        )


async def _apply(
    base: memoryview,
    manifest: weights_pb2.Manifest,
    deltas: Sequence[weights_pb2.Delta],
    received: Sequence[VerifiedWeights],
) -> memoryview:
    """All buckets of the announced version.

    Args:
        base: all buckets of the version at which the deltas begin.
        manifest: of the version at which they end.
        deltas: oldest first.
        received: the bytes of each.

    Raises:
        WeightsError: a delta is malformed, or does not lead to the announced version.
    """
    full = BucketSet.full(manifest)
    target = allocate(full.nbytes)
    wanted_deltas = [BucketSet.of_delta(delta) for delta in deltas]
    todo: Iterator[tuple[int, Sequence[Span]]] = iter(enumerate(spans_of(manifest.tensors, len(manifest.buckets))))

    def work() -> None:
        for index, spans in todo:
            part = full.part(target, index)
            # numpy copies without blocking other threads; a memoryview would block them.
            np.copyto(np.frombuffer(part, np.uint8), np.frombuffer(full.part(base, index), np.uint8))
            for delta, received_delta in zip(wanted_deltas, received, strict=True):
                apply_bucket(delta.part(received_delta.data, index), part, spans)
            full.verify(index, part)

    await asyncio.gather(*(asyncio.to_thread(work) for _ in range(_THREADS)))
    return target
