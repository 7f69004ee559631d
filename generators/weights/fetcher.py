"""Fetches the bytes of a version: by deltas where these are fewer, over the first transport that brings them.

A version that is an adapter brings its own few bytes. Its base is fetched before the first one, and kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rollmesh.generators.weights.delta_base import DeltaBase
from rollmesh.generators.weights.frozen_base import FrozenBase
from rollmesh.generators.weights.learner_connection import LearnerConnection
from rollmesh.generators.weights.relay import Relay
from rollmesh.generators.weights.transport_log import TransportLog
from rollmesh.generators.weights.transports import Transfer, Transport, choose
from rollmesh.generators.weights.verified_transfer import VerifiedWeights, receive_verified
from rollmesh.mesh.config.weights import EncodingName, TransportName
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.weights import BucketSet
from rollmesh.protos import weights_pb2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Announcement:
    """A version that a learner has announced.

    Attributes:
        manifest: as announced.
        policy: of the manifest.
        connection: to the learner that announced it.
        since_ns: Unix time in nanoseconds at which the timing of its way into service begins.
        superseded: True once its bytes are of no use any more.
    """

    manifest: weights_pb2.Manifest
    policy: PolicyVersion
    connection: LearnerConnection
    since_ns: int
    superseded: Callable[[], bool]


class WeightFetcher:
    """Fetches verified bytes.

    Args:
        available: transports, the cheapest first; closed by `close`.
        relay: serves received bytes to others.
        transport, encoding, timeout_s: as in `weights`.
        member_id: of this generator, under which others route to it.

    Attributes:
        chosen: which transport brought the weights, and why no cheaper one.
    """

    def __init__(
        self,
        available: Sequence[Transport],
        relay: Relay,
        *,
        transport: TransportName,
        encoding: EncodingName,
        timeout_s: float,
        member_id: str,
    ) -> None:
        self._available = available
        self._relay = relay
        self._transport = transport
        self._encoding = encoding
        self._timeout_s = timeout_s
        self._member_id = member_id
        self._base = DeltaBase()
        self._frozen = FrozenBase()
        self.chosen = TransportLog()

    async def close(self) -> None:
        """Releases resources that transports keep between transfers; the next transfer makes them again."""
        for transport in self._available:
            await transport.close()

    @property
    def kept_bytes(self) -> int:
        """Bytes kept: the base of the next deltas, and the base of adapters."""
        return self._base.nbytes + self._frozen.nbytes

    @property
    def frozen_base(self) -> memoryview | None:
        """The bytes of the base to which fetched adapters belong; None before the first."""
        return self._frozen.data

    async def fetch(self, announcement: Announcement) -> VerifiedWeights:
        """All bytes of the version; of an adapter also its base, unless that is here.

        Raises:
            WeightsError: no transport brings them; the error of the last one.
        """
        bucket_set = BucketSet.full(announcement.manifest)

        async def receive(part: BucketSet) -> VerifiedWeights:
            return await self._receive(announcement, part)

        manifest = announcement.manifest
        of_base = await self._frozen.fetch(manifest.base, receive) if manifest.HasField("base") else 0
        applied = await self._base.apply_deltas(manifest, receive) if self._prefers_deltas(bucket_set) else None
        received = applied or await receive(bucket_set)
        return replace(received, nbytes=received.nbytes + of_base)

    async def drop(self) -> None:
        """Keeps nothing but the base of adapters. The next version comes in full."""
        self._base.drop()
        self._relay.close()
        await self.close()

    def set_base(self, manifest: weights_pb2.Manifest, received: VerifiedWeights) -> None:
        """Records that the bytes are in service: they are the base of the next deltas."""
        if self._prefers_deltas(BucketSet.full(manifest)):
            self._base.keep(manifest, received.data)
        else:
            self._base.drop()

    def _prefers_deltas(self, bucket_set: BucketSet) -> bool:
        """True where deltas are of use; full bytes cost less where they come faster than over gRPC."""
        if self._encoding == "auto":
            return choose(self._available, self._transport, bucket_set)[0].name == "grpc"
        return self._encoding == "delta"

    async def _receive(self, announcement: Announcement, bucket_set: BucketSet) -> VerifiedWeights:
        """Receives over the first transport that succeeds; raises the error of the last one where none does."""
        transfer = Transfer(
            bucket_set,
            announcement.connection,
            self._timeout_s,
            superseded=announcement.superseded,
            member_id=self._member_id,
            relay_address=self._relay.address,
        )
        *others, last = choose(self._available, self._transport, bucket_set)
        failures: dict[str, str] = {}
        for transport in (*others, last):
            try:
                verified = await self._receive_over(transport, transfer)
            except WeightsError as error:
                if transport is last:
                    raise
                failures[transport.name] = error.message
                log.info("version %s does not come over %s: %s", bucket_set.policy, transport.name, error.message)
            else:
                self.chosen.record(transport.name, bucket_set, self._available, self._transport, failures)
                return verified
        raise AssertionError("the last one brings the bytes or raises")

    async def _receive_over(self, transport: Transport, transfer: Transfer) -> VerifiedWeights:
        """Receives over one transport; received buckets are served to others meanwhile, where they are sent here."""
        if not transport.relays:
            return await receive_verified(transport, transfer)
        buckets = self._relay.begin(transfer.bucket_set)
        try:
            verified = await receive_verified(transport, transfer, buckets.add_verified)
        except BaseException:
            self._relay.end(buckets)
            raise
        self._relay.finish(buckets)
        return verified
