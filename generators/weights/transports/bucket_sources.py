"""The sources of a version: the learner, or a generator that the learner names.

Invariants: a generator that failed is not used again during this transfer. When there is no other, the learner is used.
Channels to generators live as long as the transfer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from rollmesh.generators.weights.learner_connection import is_channel_closed
from rollmesh.generators.weights.transports.interface import Transfer
from rollmesh.mesh.access.roles import Identity, Role
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.rpc.channel import open_channel
from rollmesh.mesh.weights.contract import SERVICE_NAME
from rollmesh.protos import weights_pb2

log = logging.getLogger(__name__)
_FETCH_BUCKET = f"/{SERVICE_NAME}/FetchBucket"
# Seconds in which the learner names a source; without an answer it is the source itself.
_ROUTE_TIMEOUT_S = 5.0


@dataclass(frozen=True, eq=False, slots=True)
class BucketSource:
    """A server of FetchBucket.

    Attributes:
        address: empty for the learner.
        channels: connections to it.
    """

    address: str
    channels: Sequence[grpc.aio.Channel]

    def fetch(
        self, channel_index: int, request: weights_pb2.FetchBucketRequest
    ) -> grpc.aio.UnaryStreamCall[Any, bytes]:
        """Begins a call that returns serialized BucketChunks. It has no deadline: its reader watches it."""
        channel = self.channels[channel_index % len(self.channels)]
        begin: grpc.aio.UnaryStreamMultiCallable[Any, bytes] = channel.unary_stream(
            _FETCH_BUCKET, weights_pb2.FetchBucketRequest.SerializeToString, None
        )
        return begin(request)


class BucketSources:
    """The source in use, and its replacement after a failure.

    Args:
        transfer: in progress.
        streams: connections to a source.
        security: for connections to generators.

    Attributes:
        current: the source to use now.
    """

    current: BucketSource

    def __init__(self, transfer: Transfer, streams: int, security: SecuritySection) -> None:
        self._transfer = transfer
        self._streams = streams
        self._security = security
        self._learner = BucketSource("", transfer.connection.transfer_channels(streams))
        self._failed: list[str] = []
        self._opened: list[grpc.aio.Channel] = []
        self._lock = asyncio.Lock()

    async def open(self) -> None:
        """Asks the learner for the first source."""
        self.current = await self._route()

    async def replace(self, source: BucketSource, why: str) -> None:
        """Replaces a source by another, unless that has happened already.

        Args:
            source: a generator that failed.
            why: for the log.
        """
        async with self._lock:
            if source is self.current:
                log.info("version %s does not come from %s: %s", self._transfer.bucket_set.policy, source.address, why)
                self._failed.append(source.address)
                self.current = await self._route()

    async def close(self) -> None:
        """Closes the connections to generators."""
        for channel in self._opened:
            await channel.close()

    async def _route(self) -> BucketSource:
        transfer = self._transfer
        if not transfer.member_id:
            return self._learner
        bucket_set = transfer.bucket_set
        request = weights_pb2.RouteRequest(
            member_id=transfer.member_id,
            policy=bucket_set.policy.to_proto(),
            address=transfer.relay_address,
            failed=self._failed,
            base=bucket_set.base.to_proto() if bucket_set.base else None,
        )
        try:
            response = await transfer.connection.weights.Route(
                request, timeout=min(_ROUTE_TIMEOUT_S, transfer.timeout_s)
            )
        except grpc.aio.AioRpcError as error:
            log.debug("the learner names no source: %s", error.details())
            return self._learner
        except (grpc.aio.UsageError, asyncio.CancelledError) as error:
            if not is_channel_closed(error):
                raise
            raise WeightsError(
                f"version {bucket_set.policy}: the connection was closed, the learner has changed"
            ) from None
        address = response.address
        if not address or address in self._failed or address == transfer.relay_address:
            return self._learner
        identity = Identity(Role.GENERATOR, transfer.member_id)
        channels = [open_channel(address, self._security, identity) for _ in range(self._streams)]
        self._opened += channels
        return BucketSource(address, channels)
