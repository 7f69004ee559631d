"""Leased groups as they travel: serialized once, spliced from what is stored, in messages of bounded size."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence

from rollmesh.buffer.protocol.framing import field_header, repeated_field
from rollmesh.buffer.protocol.leases import Lease
from rollmesh.buffer.protocol.payload_framing import join_message
from rollmesh.buffer.server.front_context import FrontContext
from rollmesh.buffer.server.lease_roll_call import RollCall
from rollmesh.buffer.store.records import Leased
from rollmesh.protos import buffer_pb2 as pb

log = logging.getLogger(__name__)
_MESSAGE_BYTES = 1 << 20
# Bytes of a message around its groups and payloads.
_FRAME_BYTES = 1 << 10
_GROUPS, _PAYLOADS = (pb.SampleResponse.DESCRIPTOR.fields_by_name[name].number for name in ("groups", "payloads"))
_TASK, _MEMBERS = (pb.LeasedGroup.DESCRIPTOR.fields_by_name[name].number for name in ("task", "members"))


async def messages_of(
    front: FrontContext,
    table: str,
    leased: Sequence[Leased],
    roll: RollCall,
    unsendable: dict[str, list[Lease]],
    *,
    with_payloads: bool,
) -> AsyncIterator[bytes]:
    """Serialized messages.

    Args:
        front: what the front shares.
        table, leased: the groups.
        roll: of the stream; it notes those that are sent.
        unsendable: gets groups that are too large for a message, or lack a payload, by reason.
        with_payloads: whether the stream's learner asked for payloads.
    """
    if not leased:
        return
    store, most = front.store, front.max_message_bytes
    prompts = await store.prompts(table, [group.prompt for group in leased])
    values = store.payloads.of_groups(table, leased, inline=with_payloads)
    parts: list[bytes] = []
    payloads: list[bytes] = []
    size = 0
    for group in leased:
        lease = Lease.of(group)
        stored = await anext(values)
        if group.prompt not in prompts or None in stored:
            unsendable.setdefault("payload_lost", []).append(lease)
            continue
        of_members = _payloads_by_member(group, stored) if with_payloads else None
        message = _spliced_group(group, prompts[group.prompt], of_members)
        length = sum(map(len, message))
        if length + _FRAME_BYTES > most:
            log.error("group %s has %d bytes without its payloads: it fits into no message", group.group_id, length)
            unsendable.setdefault("too_large", []).append(lease)
            continue
        length += sum(map(len, of_members or ()))
        if parts and size + length + _FRAME_BYTES > most:
            yield join_message(_PAYLOADS, payloads, parts)
            parts, payloads, size = [], [], 0
        roll.record_sent(lease)
        parts += (field_header(_GROUPS, sum(map(len, message))), *message)
        payloads += of_members or ()
        size += length
        if size >= _MESSAGE_BYTES:
            yield join_message(_PAYLOADS, payloads, parts)
            parts, payloads, size = [], [], 0
    if parts:
        yield join_message(_PAYLOADS, payloads, parts)


def _payloads_by_member(group: Leased, stored: Sequence[bytes | None]) -> list[bytes]:
    """The payload that travels of each member: empty if it is not scored or left out."""
    found = [b""] * len(group.metas)
    for ref, value in zip(group.payload_refs, stored, strict=True):
        found[ref.member] = value or b""
    return found


def _spliced_group(group: Leased, prompt: bytes, payloads: Sequence[bytes] | None) -> list[bytes]:
    """A LeasedGroup, serialized: parts to be joined; the payloads, by member, are sent next to it."""
    message = pb.LeasedGroup(
        group_id=group.group_id,
        lease_id=group.lease_id,
        for_version=group.for_version,
        attempt=group.attempt,
        generating_ms=group.generating_ms,
        queued_ms=group.queued_ms,
        use=group.use,
        probability=group.probability,
        priority=group.priority,
    )
    if payloads is not None:
        message.payload_bytes.extend(map(len, payloads))
        if not all(payloads):
            left = {ref.member: max(1, ref.pieces) for ref in group.payload_refs if not payloads[ref.member]}
            if left:
                message.pieces.extend(left.get(member, 0) for member in range(len(group.metas)))
    return [
        message.SerializeToString(),
        field_header(_TASK, len(prompt)),
        prompt,
        *repeated_field(_MEMBERS, group.metas),
    ]
