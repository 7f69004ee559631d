"""The host copy of the weights in service, from which differences lead to the next ones.

Invariants: it is never changed: differences are applied to a copy of it, so that it stays whole for those who read it
and for another attempt; what comes out agrees with the full digests of the version announced, bucket by bucket, or
is thrown away; where the differences do not lead there, for whatever reason, the caller fetches the full bytes.

Memory: the copy, and a second one from the first difference on until the swap.
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
from rollmesh.mesh.weights import Wanted
from rollmesh.mesh.weights.delta import Span, apply_bucket, spans_of
from rollmesh.mesh.weights.delta_path import delta_path
from rollmesh.protos import weights_pb2

log = logging.getLogger(__name__)
# Buckets in work at a time. Decoding continues meanwhile, and needs the other cores.
_THREADS = 2


class DeltaBase:
    """What differences are applied to; empty at first. Used in one event loop."""

    def __init__(self) -> None:
        self._manifest: weights_pb2.Manifest | None = None
        self._data = memoryview(b"")

    @property
    def nbytes(self) -> int:
        """Bytes kept."""
        return len(self._data)

    def keep(self, manifest: weights_pb2.Manifest, data: memoryview) -> None:
        """Takes verified weights as the base of what comes next, in place of those before."""
        self._manifest, self._data = manifest, data

    def drop(self) -> None:
        """Keeps nothing: the next version comes in full."""
        self._manifest, self._data = None, memoryview(b"")

    async def advance(
        self, manifest: weights_pb2.Manifest, receive: Callable[[Wanted], Awaitable[VerifiedWeights]]
    ) -> VerifiedWeights | None:
        """The weights that are announced, by differences.

        Args:
            manifest: as announced, checked.
            receive: brings the bytes of one link.

        Returns:
            None where they have to be fetched in full: there is no way from here, it is not shorter, or it failed.
        """
        if self._manifest is None:
            return None
        links = delta_path(self._manifest, manifest)
        if not links:
            return None
        try:
            received = [await receive(Wanted.link(link)) for link in links]
            data = await _apply(self._data, manifest, links, received)
        except WeightsError as error:
            log.warning("version %d comes in full, its differences failed: %s", manifest.policy.version, error.message)
            return None
        return replace(
            received[-1],
            data=data,
            nbytes=sum(link.nbytes for link in received),
            first_byte_ns=received[0].first_byte_ns,
            last_byte_ns=time.time_ns(),
        )


async def _apply(
    base: memoryview,
    manifest: weights_pb2.Manifest,
    links: Sequence[weights_pb2.Delta],
    received: Sequence[VerifiedWeights],
) -> memoryview:
    """All buckets of the version announced.

    Args:
        base: all buckets of the version at which the links begin.
        manifest: of the version at which they end.
        links: oldest first.
        received: the bytes of each.

    Raises:
        WeightsError: a difference is malformed, or does not lead to what was announced.
    """
    full = Wanted.full(manifest)
    target = allocate(full.nbytes)
    of_links = [Wanted.link(link) for link in links]
    todo: Iterator[tuple[int, Sequence[Span]]] = iter(enumerate(spans_of(manifest.tensors, len(manifest.buckets))))

    def work() -> None:
        for index, spans in todo:
            part = full.part(target, index)
            # numpy copies without holding up other threads; a memoryview would.
            np.copyto(np.frombuffer(part, np.uint8), np.frombuffer(full.part(base, index), np.uint8))
            for link, bytes_of_link in zip(of_links, received, strict=True):
                apply_bucket(link.part(bytes_of_link.data, index), part, spans)
            full.verify(index, part)

    await asyncio.gather(*(asyncio.to_thread(work) for _ in range(_THREADS)))
    return target
