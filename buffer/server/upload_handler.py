"""The front's side of Upload: pieces of large payloads go to Redis, side data to files, both as they come.

Invariants
  * Only the holder that may still write a member may upload for it; others learn from their write that they may not.
  * A front holds at most `_IN_FLIGHT` pieces for Redis, however many uploads run; each stream holds one more.
  * A write that names pieces or side data counts only if they are all there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from rollmesh.buffer.protocol.limits import MAX_PIECES, PIECE_BYTES
from rollmesh.buffer.protocol.side_data import check_digest, check_name
from rollmesh.buffer.server.front_context import FrontContext
from rollmesh.buffer.server.request_validation import check_group_id
from rollmesh.buffer.store.payloads import PayloadRef, name_of
from rollmesh.buffer.store.records import MemberState, Write
from rollmesh.mesh.errors import PayloadError
from rollmesh.protos import buffer_pb2 as pb

_IN_FLIGHT = 4


class UploadHandler:
    """All uploads of one front.

    Args:
        front: what the front shares.
    """

    def __init__(self, front: FrontContext) -> None:
        self._front = front
        self._room = asyncio.Semaphore(_IN_FLIGHT)

    async def handle(self, requests: AsyncIterator[pb.UploadRequest]) -> pb.UploadResponse:
        """The Upload handler.

        Raises:
            PayloadError: a malformed request.
            StoreError: Redis or the disk does not take it.
        """
        first = await anext(aiter(requests), None)
        if first is None:
            return pb.UploadResponse()
        table = self._front.checked_table(first.table)
        check_group_id("group_id", first.group_id)
        state = await self._state(table, first)
        if state is MemberState.NO_SUCH_MEMBER:
            raise PayloadError("member", "the group has fewer members")
        if state is not MemberState.OPEN:
            return pb.UploadResponse()
        reader = _PieceReader(first, requests)
        if first.side:
            await self._front.store.side.receive(
                table, first.group_id, first.member, check_name(first.side), reader.in_order()
            )
        else:
            await self._pieces(table, first, reader)
        return pb.UploadResponse(pieces=reader.pieces, bytes=reader.bytes)

    async def _state(self, table: str, write: pb.UploadRequest | Write) -> MemberState:
        return await self._front.store.member_state(table, write.group_id, write.lease_id, write.attempt, write.member)

    async def _pieces(self, table: str, first: pb.UploadRequest, reader: _PieceReader) -> None:
        """Stores each piece while the next one arrives."""
        payload_ref = PayloadRef(name_of(first.member, first.attempt, check_digest("digest", first.digest)))

        async def put(piece: int, data: bytes) -> None:
            payloads = self._front.store.payloads
            async with self._room:
                if not await payloads.put_piece(table, first.group_id, payload_ref, piece, data):
                    raise PayloadError("digest", f"piece {piece} of that digest is already stored with other bytes")

        storing: asyncio.Task[None] | None = None
        try:
            async for piece, data in reader:
                if storing is not None:
                    await storing
                storing = asyncio.create_task(put(piece, data))
            if storing is not None:
                await storing
        finally:
            if storing is not None:
                storing.cancel()
                await asyncio.gather(storing, return_exceptions=True)

    async def check(self, table: str, write: Write) -> None:
        """Checks that all uploads that a write names are there.

        Raises:
            PayloadError: naming the field that is wrong. Not where the member may not be written any more: then the
                uploads may be gone, and the write says what became of it.
        """
        wrong = await self._wrong(table, write)
        if wrong is None:
            return
        if await self._state(table, write) is MemberState.OPEN:
            raise wrong

    async def _wrong(self, table: str, write: Write) -> PayloadError | None:
        store = self._front.store
        if write.pieces:
            keys = store.payloads.keys_of(table, write.group_id, write.payload_ref)
            sizes = await store.payloads.sizes(keys)
            if not all(sizes):
                return PayloadError("pieces", f"piece {sizes.index(0)} of {write.pieces} was not uploaded")
            if sum(sizes) != write.size:
                return PayloadError("uploaded_bytes", f"{write.size}, but the pieces have {sum(sizes)}")
            if not await store.payloads.begins_with(keys[0], write.payload):
                return PayloadError("payload", "does not match the beginning of the uploaded pieces")
        if write.side:
            missing = await store.side.find_missing(table, write.group_id, write.member, write.side)
            if missing:
                return PayloadError(f"meta.side.{missing}", f"no such file: {store.side.hint}")
        return None


class _PieceReader:
    """The pieces of one stream, checked and counted."""

    def __init__(self, first: pb.UploadRequest, rest: AsyncIterator[pb.UploadRequest]) -> None:
        self._first = first
        self._rest = rest
        self.pieces = 0
        self.bytes = 0

    async def __aiter__(self) -> AsyncIterator[tuple[int, bytes]]:
        yield self._checked(self._first)
        async for request in self._rest:
            yield self._checked(request)

    async def in_order(self) -> AsyncIterator[bytes]:
        """The bytes of pieces that come from the first to the last."""
        expected = 0
        async for piece, data in self:
            if piece != expected:
                raise PayloadError("piece", f"expected {expected}, got {piece}: side data is sent in order")
            expected += 1
            yield data

    def _checked(self, request: pb.UploadRequest) -> tuple[int, bytes]:
        first = self._first
        for name in ("table", "group_id", "lease_id", "attempt", "member", "side", "digest"):
            if getattr(request, name) != getattr(first, name):
                raise PayloadError(name, "one upload is for one member and one name")
        if not first.side and request.piece >= MAX_PIECES:
            raise PayloadError("piece", f"{request.piece} is over the {MAX_PIECES - 1} that a payload may have")
        if not 0 < len(request.data) <= PIECE_BYTES:
            raise PayloadError("data", f"a piece has 1 to {PIECE_BYTES} bytes, got {len(request.data)}")
        self.pieces += 1
        self.bytes += len(request.data)
        return request.piece, request.data
