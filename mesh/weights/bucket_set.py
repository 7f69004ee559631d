"""The buckets that a receiver fetches of a version: its full bytes, or one link of deltas that leads to it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.telemetry.metric_spec import SpecFactory
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.weights.digest import Buffer, digest_of
from rollmesh.mesh.weights.manifest import bucket_starts
from rollmesh.protos import weights_pb2

log = logging.getLogger(__name__)
DAMAGED_BUCKETS = SpecFactory("generator").counter(
    "weights_damaged_buckets", "Buckets with bytes that were not those announced"
)
# The process has one, which a generator shows.
DAMAGED = DAMAGED_BUCKETS.as_counter()
Encoding = Literal["full", "delta"]


@dataclass(frozen=True, slots=True)
class BucketSet:
    """Buckets that belong together, as they travel.

    Attributes:
        policy: the version that they lead to.
        base: the version that they are applied to; None: they are the version's full bytes.
        buckets: length and digest of each.
        offers: where the full bytes are, in addition to the learner's service; none for deltas.
        digest: of the version's manifest; empty for deltas.
        starts: `bucket_starts` of them.
    """

    policy: PolicyVersion
    base: PolicyVersion | None
    buckets: Sequence[weights_pb2.BucketEntry]
    offers: Sequence[weights_pb2.Offer] = ()
    digest: str = ""
    starts: Sequence[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "starts", bucket_starts(self.buckets))

    @classmethod
    def full(cls, manifest: weights_pb2.Manifest) -> BucketSet:
        """All bytes of a version."""
        policy = PolicyVersion.from_proto(manifest.policy)
        return cls(policy, None, manifest.buckets, manifest.offers, manifest.digest)

    @classmethod
    def of_delta(cls, delta: weights_pb2.Delta) -> BucketSet:
        """The buckets of one delta."""
        return cls(PolicyVersion.from_proto(delta.policy), PolicyVersion.from_proto(delta.base), delta.buckets)

    @property
    def encoding(self) -> Encoding:
        return "full" if self.base is None else "delta"

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets, concatenated and padded."""
        return self.starts[-1]

    def offer(self, transport: str) -> weights_pb2.Offer | None:
        """The offer of a transport; None if it offers nothing."""
        return next((offer for offer in self.offers if offer.transport == transport), None)

    def part(self, data: memoryview, index: int) -> memoryview:
        """The bytes of one bucket among those of all."""
        return data[self.starts[index] : self.starts[index] + self.buckets[index].nbytes]

    def verify(self, index: int, data: Buffer) -> None:
        """Compares a bucket's bytes with the digest that was announced.

        Raises:
            WeightsError: where they differ.
        """
        entry = self.buckets[index]
        found = digest_of(data)
        if len(data) != entry.nbytes or found != entry.digest:
            DAMAGED.inc()
            # The error goes to their announcer, which must not learn what else was read in their place.
            log.warning(
                "%s: %d bytes with digest %s, announced were %d with %s",
                self.name(index),
                len(data),
                found,
                entry.nbytes,
                entry.digest,
            )
            raise WeightsError(f"{self.name(index)} is damaged: its bytes are not those that were announced")

    def name(self, index: int) -> str:
        """Names a bucket for messages."""
        return f"bucket {index} of version {self.policy}" + (f" (from {self.base})" if self.base else "")
