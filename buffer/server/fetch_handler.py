"""The front's side of Fetch: payloads and side data in messages of bounded size, read as they are sent."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence

from rollmesh.buffer.server.front_context import FrontContext
from rollmesh.buffer.server.request_validation import check_group_id
from rollmesh.buffer.store.payloads import PayloadMissing, PayloadRef
from rollmesh.mesh.errors import DataError
from rollmesh.protos import buffer_pb2 as pb
from rollmesh.protos import trajectory_pb2 as trajectory

# Bytes at which a message is sent; it has at most this and a piece.
_MESSAGE_BYTES = 512 << 10


async def fetch_stream(front: FrontContext, request: pb.FetchRequest) -> AsyncIterator[pb.FetchResponse]:
    """The Fetch handler.

    Raises:
        DataError: a group has ended, or has no such data.
    """
    table = front.checked_table(request.table)
    for index, ref in enumerate(request.members):
        check_group_id(f"members[{index}].group_id", ref.group_id)
    response, size = pb.FetchResponse(), 0
    for side, run in itertools.groupby(request.members, key=lambda ref: bool(ref.side)):
        refs = list(run)
        parts = _side(front, table, refs) if side else _payloads(front, table, refs)
        async for data, last in parts:
            response.payloads.append(data)
            size += len(data)
            response.continues = not last
            if size >= _MESSAGE_BYTES or not last:
                yield response
                response, size = pb.FetchResponse(), 0
    if response.payloads:
        yield response


async def _payloads(front: FrontContext, table: str, refs: Sequence[pb.MemberRef]) -> AsyncIterator[tuple[bytes, bool]]:
    found = await front.store.payload_refs(table, list(dict.fromkeys(ref.group_id for ref in refs)))
    members: list[tuple[str, PayloadRef]] = []
    for ref in refs:
        payload_ref = next((payload for payload in found[ref.group_id] if payload.member == ref.member), None)
        if payload_ref is None:
            raise _missing(ref)
        members.append((ref.group_id, payload_ref))
    try:
        async for part in front.store.payloads.stream(table, members):
            yield part.data, part.last
    except PayloadMissing as missing:
        raise _missing(refs[missing.index]) from missing


async def _side(front: FrontContext, table: str, refs: Sequence[pb.MemberRef]) -> AsyncIterator[tuple[bytes, bool]]:
    metas = await front.store.member_metas(table, [(ref.group_id, ref.member) for ref in refs])
    for ref, blob in zip(refs, metas, strict=True):
        meta = trajectory.MemberMeta.FromString(blob or b"")
        entry = next((entry for entry in meta.side if entry.name == ref.side), None)
        if entry is None:
            raise DataError(
                f"no side data {ref.side} of group {ref.group_id}, member {ref.member}",
                hint="the group has ended, or this member has no data of that name",
            )
        async for data, last in front.store.side.read(table, ref.group_id, ref.member, entry):
            yield data, last


def _missing(ref: pb.MemberRef) -> DataError:
    return DataError(
        f"no payload of group {ref.group_id}, member {ref.member}",
        hint="the group has ended, or this member is not scored",
    )
