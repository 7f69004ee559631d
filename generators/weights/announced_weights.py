"""The weights of a version in service as they were announced, with what it takes to compute them again."""

from __future__ import annotations

from dataclasses import dataclass

from rollmesh.protos import weights_pb2


@dataclass(frozen=True, slots=True)
class AnnouncedWeights:
    """A version as announced.

    Attributes:
        manifest: of the version, checked.
        adapter: bytes of its tensors, where they are an adapter's; else None: their digests say enough.
        base: bytes of the base to which the adapter belongs.
    """

    manifest: weights_pb2.Manifest
    adapter: memoryview | None = None
    base: memoryview | None = None
