"""A version that can be fetched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollmesh.learner.weights.version_storage import VersionBytes
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import weights_pb2


@dataclass(frozen=True, slots=True)
class PublishedVersion:
    """A version that can be fetched.

    Attributes:
        manifest: as announced; never changed.
        data: its buckets, concatenated.
        starts: `bucket_starts` of its buckets, in `data`.
    """

    manifest: weights_pb2.Manifest
    data: VersionBytes
    starts: Sequence[int]

    @property
    def policy(self) -> PolicyVersion:
        """The version's number."""
        return PolicyVersion.from_proto(self.manifest.policy)

    def bucket(self, index: int) -> memoryview:
        """The bytes of one bucket, without a copy; valid as long as this object or the view lives."""
        start = self.starts[index]
        return self.data.view()[start : start + self.manifest.buckets[index].nbytes]
