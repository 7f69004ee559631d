"""Failed groups: noted with their cause, listed, and queued again on request.

Invariant: a note keeps its prompt until it is redriven, or dropped for a newer note. So a group that can be redriven
can be trained.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rollmesh.buffer.store.store import Store
from rollmesh.protos import buffer_pb2 as pb


def failed_group(note: bytes) -> pb.FailedGroup:
    """A note in the form of the contract."""
    fields: dict[str, Any] = json.loads(note)
    return pb.FailedGroup(
        group_id=fields["group"],
        task_id=fields["task"],
        reason=fields["reason"],
        attempts=int(fields["attempts"]),
        failed_unix_ms=int(fields["failed_ms"]),
        causes=list(fields.get("causes", ())),
        ordinal=int(fields["ordinal"]),
        redriven=fields["redriven"],
    )


async def _read_notes(store: Store, table: str) -> dict[str, dict[str, Any]]:
    """Notes of failed groups, the oldest first."""
    order, flat = await store.redis.batch(
        [("LRANGE", store.keys.table(table, "failures"), 0, -1), ("HGETALL", store.keys.table(table, "dead"))]
    )
    found = dict(zip(flat[::2], flat[1::2], strict=True))
    return {group_id.decode(): json.loads(found[group_id]) for group_id in reversed(order) if group_id in found}


async def redrive(store: Store, table: str, group_ids: Sequence[str]) -> pb.RedriveResponse:
    """Queues prompts of failed groups again; no ids: all that can be.

    A note without its prompt does not count: a group of it could only fail again.
    """
    notes = await _read_notes(store, table)
    asked = list(dict.fromkeys(group_ids)) or [group_id for group_id, note in notes.items() if note["kept"]]
    ordinals = {group_id: int(notes[group_id]["ordinal"]) for group_id in asked if group_id in notes}
    digests = await store.redis.mget([store.keys.digest(table, ordinal) for ordinal in ordinals.values()])
    names = [f"{o}:{(digest or b'').decode()}" for o, digest in zip(ordinals.values(), digests, strict=True)]
    # Asked of Redis: a front may remember prompts that are gone.
    there = await store.redis.batch([("EXISTS", store.keys.prompt(table, name)) for name in names])
    proposed = [group_id for group_id, found in zip(ordinals, there, strict=True) if found]
    queued, refused = await store.redrive(table, proposed) if proposed else (0, [])
    unknown = [group_id for group_id in asked if group_id not in proposed or group_id in refused]
    return pb.RedriveResponse(redriven=queued, unknown=unknown)
