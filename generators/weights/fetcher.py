"""Obtains the bytes of a version: by differences where these are fewer, over the first transport that brings them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollmesh.generators.weights.delta_base import DeltaBase
from rollmesh.generators.weights.learner_connection import LearnerConnection
from rollmesh.generators.weights.relay import Relay
from rollmesh.generators.weights.transport_choice import TransportChoice
from rollmesh.generators.weights.transports import Transfer, Transport, choose
from rollmesh.generators.weights.verified_transfer import VerifiedWeights, receive_verified
from rollmesh.mesh.config.models import EncodingName, TransportName
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.weights import Wanted
from rollmesh.protos import weights_pb2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Announcement:
    """A version that a learner has announced.

    Attributes:
        manifest: what was announced.
        policy: of the manifest.
        connection: to the learner that announced it.
        since_ns: Unix time in nanoseconds from which its way into service is timed.
        superseded: whether its bytes are of no use any more.
    """

    manifest: weights_pb2.Manifest
    policy: PolicyVersion
    connection: LearnerConnection
    since_ns: int
    superseded: Callable[[], bool]


class WeightFetcher:
    """Brings verified bytes.

    Args:
        available: transports, the cheapest first; closed by `close`.
        relay: serves others what comes here.
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
        self.chosen = TransportChoice()

    async def close(self) -> None:
        """Gives back what transports keep between transfers."""
        for transport in self._available:
            await transport.close()

    @property
    def kept_bytes(self) -> int:
        """What is kept to apply the next differences to."""
        return self._base.nbytes

    async def obtain(self, announcement: Announcement) -> VerifiedWeights:
        """All bytes of the version.

        Raises:
            WeightsError: no transport brings them; what the last one said.
        """
        wanted = Wanted.full(announcement.manifest)

        async def fetch(link: Wanted) -> VerifiedWeights:
            return await self._receive(announcement, link)

        advanced = await self._base.advance(announcement.manifest, fetch) if self._by_differences(wanted) else None
        return advanced or await fetch(wanted)

    def taken(self, manifest: weights_pb2.Manifest, received: VerifiedWeights) -> None:
        """The bytes are in service: the next differences are from them."""
        if self._by_differences(Wanted.full(manifest)):
            self._base.keep(manifest, received.data)
        else:
            self._base.drop()

    def _by_differences(self, wanted: Wanted) -> bool:
        """Whether differences are of use; where the full bytes come faster than over gRPC, these cost less."""
        if self._encoding == "auto":
            return choose(self._available, self._transport, wanted)[0].name == "grpc"
        return self._encoding == "delta"

    async def _receive(self, announcement: Announcement, wanted: Wanted) -> VerifiedWeights:
        """By the first transport that brings it; the error of the last one where none does."""
        transfer = Transfer(
            wanted,
            announcement.connection,
            self._timeout_s,
            superseded=announcement.superseded,
            member_id=self._member_id,
            relay_address=self._relay.address,
        )
        *others, last = choose(self._available, self._transport, wanted)
        failures: dict[str, str] = {}
        for transport in (*others, last):
            try:
                verified = await self._receive_over(transport, transfer)
            except WeightsError as error:
                if transport is last:
                    raise
                failures[transport.name] = error.message
                log.info("version %s does not come over %s: %s", wanted.policy, transport.name, error.message)
            else:
                self.chosen.note(transport.name, wanted, self._available, self._transport, failures)
                return verified
        raise AssertionError("the last one brings the bytes or raises")

    async def _receive_over(self, transport: Transport, transfer: Transfer) -> VerifiedWeights:
        """Over one transport; what has come is served to others meanwhile, where they are sent here."""
        if not transport.relays:
            return await receive_verified(transport, transfer)
        holding = self._relay.begin(transfer.wanted)
        try:
            verified = await receive_verified(transport, transfer, holding.verified)
        except BaseException:
            self._relay.end(holding)
            raise
        self._relay.finish(holding)
        return verified
