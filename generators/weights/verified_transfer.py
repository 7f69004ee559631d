"""Verified transfers of a version, over any transport.

Invariant: the bytes that `receive_verified` returns agree with the announced digests; all else ends in a WeightsError.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from rollmesh.generators.weights.transports import Transfer, Transport
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.weights import Encoding

# Verifying more than this would hold up the event loop for milliseconds.
_VERIFY_INLINE_BYTES = 8 << 20
# Larger buckets verified at once, each in a thread. Where pages are touched for the first time, two are 1.4 times as
# fast as one, and decoding needs the cores as well.
_VERIFIERS = 2


@dataclass(frozen=True, slots=True)
class VerifiedWeights:
    """The verified bytes of all buckets, concatenated.

    Attributes:
        data: alive as long as this object or a view of it.
        transport: on which they came; empty where nothing was transferred.
        encoding: as which they came.
        nbytes: that were transferred.
        source: address of the generator that sent them; empty for the learner.
        first_byte_ns, last_byte_ns: Unix time in nanoseconds: the first bucket there, the last one verified.
    """

    data: memoryview
    transport: str
    encoding: Encoding
    nbytes: int
    source: str
    first_byte_ns: int
    last_byte_ns: int


def nothing_received() -> VerifiedWeights:
    """The outcome for a version with weights that are here already."""
    now = time.time_ns()
    return VerifiedWeights(memoryview(b""), "", "full", 0, "", now, now)


async def receive_verified(
    transport: Transport, transfer: Transfer, verified: Callable[[memoryview, int], None] | None = None
) -> VerifiedWeights:
    """Receives and verifies; each bucket is verified while the next is on its way.

    Args:
        transport: brings the bytes.
        transfer: of one version or delta.
        verified: called with all buckets' memory and the index of each bucket that agrees with its digest, at once.

    Raises:
        WeightsError: a bucket did not come, or is damaged.
    """
    bucket_set = transfer.bucket_set
    first_byte_ns = 0
    verifying: list[asyncio.Future[None]] = []
    damage: list[WeightsError] = []
    verifiers = asyncio.Semaphore(_VERIFIERS)

    def arrived(data: memoryview, index: int) -> None:
        nonlocal first_byte_ns
        first_byte_ns = first_byte_ns or time.time_ns()
        if damage:
            # The rest is not needed.
            raise damage[0]
        part = bucket_set.part(data, index)
        if len(part) <= _VERIFY_INLINE_BYTES:
            bucket_set.verify(index, part)
            if verified is not None:
                verified(data, index)
        else:
            verifying.append(asyncio.ensure_future(verify_in_thread(data, index)))

    async def verify_in_thread(data: memoryview, index: int) -> None:
        async with verifiers:
            try:
                await asyncio.to_thread(bucket_set.verify, index, bucket_set.part(data, index))
            except WeightsError as error:
                damage.append(error)
                return
        if verified is not None:
            verified(data, index)

    try:
        received = await transport.receive(transfer, arrived)
        await asyncio.gather(*verifying)
        if damage:
            raise damage[0]
    finally:
        # A verification cannot be stopped; one with a useless result is not awaited.
        for task in verifying:
            task.cancel()
    moved = sum(bucket.nbytes for bucket in bucket_set.buckets)
    return VerifiedWeights(
        received.data, transport.name, bucket_set.encoding, moved, received.source, first_byte_ns, time.time_ns()
    )
