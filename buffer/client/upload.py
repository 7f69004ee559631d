"""The client's side of Upload: large payloads in pieces, and side data.

Invariants: a payload is sent in calls of bounded size, each with a deadline, and a call that broke is repeated without
those before it. Pieces are cut as they are sent. Few uploads run at once, the others wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from rollmesh.buffer.client.pending_write import PendingWrite
from rollmesh.buffer.protocol.limits import PIECE_BYTES
from rollmesh.buffer.protocol.side_data import DTYPES, check_name
from rollmesh.mesh.errors import PayloadError
from rollmesh.mesh.rpc.retries import call_with_retry
from rollmesh.mesh.trajectory.payload_codec import head_of
from rollmesh.protos import buffer_pb2 as pb
from rollmesh.protos import trajectory_pb2 as trajectory

_PIECES_PER_CALL = 16
_AT_ONCE = 2
# Below this rate a transfer does not count as one: its deadline grows by its bytes over it.
SLOWEST_BYTES_PER_S = 1 << 20


class Uploader:
    """Uploads of one client.

    Args:
        stub: of the buffer.
        timeout_s: deadline of one call, apart from the time that its bytes take.
        retry_s: seconds for which a call is repeated.
    """

    def __init__(self, stub: Any, timeout_s: float, retry_s: float) -> None:
        self._stub = stub
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._room = asyncio.Semaphore(_AT_ONCE)

    async def payload(self, table: str, write: PendingWrite) -> PendingWrite:
        """Uploads the payload of a write; returns the write that names it.

        Raises:
            RollmeshError: the buffer refuses it, or stays away.
        """
        payload, named = write.payload, write.head
        head = head_of(payload)
        target = _target(table, named.group_id, named.lease_id, named.attempt, named.meta.member)
        target.digest = xxhash.xxh3_64_hexdigest(payload)
        pieces = -(-len(payload) // PIECE_BYTES)
        async with self._room:
            for first in range(0, pieces, _PIECES_PER_CALL):
                span = range(first, min(pieces, first + _PIECES_PER_CALL))
                if not await self._send(target, payload, span):
                    break
        uploaded = pb.MemberWrite(
            group_id=named.group_id, lease_id=named.lease_id, attempt=named.attempt, meta=named.meta,
            pieces=pieces, uploaded_bytes=len(payload), uploaded_digest=target.digest,
        )  # fmt: skip
        return PendingWrite(uploaded, head)

    async def side(
        self, table: str, grant: pb.GroupGrant, member: int, name: str, data: bytes | NDArray[np.generic]
    ) -> trajectory.SideData:
        """Uploads side data of a member; returns its entry, to be put into the member's `MemberMeta.side`.

        Raises:
            PayloadError: a bad name or element type, no bytes, or more than the buffer takes.
            RollmeshError: the buffer refuses it, or stays away.
        """
        entry = trajectory.SideData(name=check_name(name))
        if isinstance(data, np.ndarray):
            if data.dtype.name not in DTYPES:
                raise PayloadError("dtype", f"expected one of {', '.join(DTYPES)}, got {data.dtype}")
            entry.dtype = data.dtype.name
            entry.shape.extend(data.shape)
            data = np.ascontiguousarray(data, dtype=data.dtype.newbyteorder("<")).tobytes()
        if not data:
            raise PayloadError("data", "is empty")
        entry.bytes, entry.digest = len(data), xxhash.xxh3_64_hexdigest(data)
        target = _target(table, grant.group_id, grant.lease_id, grant.attempt, member, name)
        async with self._room:
            await self._send(target, data, range(-(-len(data) // PIECE_BYTES)))
        return entry

    async def _send(self, target: pb.UploadRequest, data: bytes, pieces: Sequence[int]) -> bool:
        """Sends some pieces in one call; False if they are no longer wanted."""

        async def requests() -> AsyncIterator[pb.UploadRequest]:
            view = memoryview(data)
            for piece in pieces:
                request = pb.UploadRequest()
                request.CopyFrom(target)
                request.piece = piece
                request.data = bytes(view[piece * PIECE_BYTES : (piece + 1) * PIECE_BYTES])
                yield request

        timeout_s = self._timeout_s + len(pieces) * PIECE_BYTES / SLOWEST_BYTES_PER_S
        response: pb.UploadResponse = await call_with_retry(
            lambda: self._stub.Upload(requests(), timeout=timeout_s), retry_s=self._retry_s, what="uploading"
        )
        return response.pieces == len(pieces)


def _target(table: str, group_id: str, lease_id: str, attempt: int, member: int, side: str = "") -> pb.UploadRequest:
    return pb.UploadRequest(
        table=table, group_id=group_id, lease_id=lease_id, attempt=attempt, member=member, side=side
    )
