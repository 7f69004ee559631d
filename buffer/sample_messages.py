"""Leased groups as they travel: serialized once, and spliced from what is stored."""

from __future__ import annotations

from collections.abc import Sequence

from buffer.records import Leased
from buffer.splice import fields, opening
from protos import buffer_pb2 as pb

_TASK, _MEMBERS = (pb.LeasedGroup.DESCRIPTOR.fields_by_name[name].number for name in ("task", "members"))


def payloads_by_member(group: Leased, stored: Sequence[bytes | None]) -> list[bytes]:
    """What travels of each member: nothing of those that are not scored, or are left out."""
    found = [b""] * len(group.metas)
    for place, value in zip(group.places, stored, strict=True):
        found[place.member] = value or b""
    return found


def spliced_group(group: Leased, prompt: bytes, payloads: Sequence[bytes] | None) -> list[bytes]:
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
        left = {place.member: max(1, place.pieces) for place in group.places if not payloads[place.member]}
        if left:
            message.pieces.extend(left.get(member, 0) for member in range(len(group.metas)))
    return [message.SerializeToString(), opening(_TASK, len(prompt)), prompt, *fields(_MEMBERS, group.metas)]
