"""The host copy of the base to which adapters belong: fetched once, in whatever incarnation, and known by its digest.

Invariants: a base is kept only once its bytes agree with their digests, and is never changed. It outlives the weights
in service: an engine that has given its weights up gets them from here and the newest adapter.

Memory: the base in its wire dtype; nothing where the learner's own file is mapped (shm).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from rollmesh.generators.weights.verified_transfer import VerifiedWeights
from rollmesh.mesh.weights import BucketSet
from rollmesh.protos import weights_pb2


class FrozenBase:
    """The base of the adapters of a run; empty at first. Used in one event loop."""

    def __init__(self) -> None:
        self._digest = ""
        self._received: VerifiedWeights | None = None

    @property
    def data(self) -> memoryview | None:
        """All its buckets, concatenated; None before the first."""
        return self._received.data if self._received is not None else None

    @property
    def nbytes(self) -> int:
        """Bytes kept in memory of this process."""
        received = self._received
        return len(received.data) if received is not None and received.transport != "shm" else 0

    async def fetch(
        self, manifest: weights_pb2.Manifest, receive: Callable[[BucketSet], Awaitable[VerifiedWeights]]
    ) -> int:
        """Has a base, or fetches it; returns the bytes that were transferred.

        Args:
            manifest: of the base, checked.
            receive: brings the verified bytes.

        Raises:
            WeightsError: they did not come; what was here before is kept.
        """
        if self._received is not None and manifest.digest == self._digest:
            return 0
        self._received = received = await receive(BucketSet.full(manifest))
        self._digest = manifest.digest
        return received.nbytes
