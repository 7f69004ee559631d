"""Commands of members: they join, send heartbeats and leave; any front lists them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rollmesh.buffer.redis_backend.access import RedisAccess
from rollmesh.buffer.store.keys import Keys
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import membership_pb2 as pb

# Entries that are parsed in one turn of the event loop: about a millisecond.
_PARSED_AT_ONCE = 50


class _Row(NamedTuple):
    """A member as Redis has it: its description, its last heartbeat, and the time of that in Unix milliseconds."""

    name: bytes
    description: bytes
    status: bytes | None
    beat: bytes | None


class _Entry(NamedTuple):
    """A member as it was last read: parsed again only where its bytes have changed."""

    description: bytes
    status: bytes | None
    member: pb.Member


class MeshStatus(NamedTuple):
    """The state of the mesh, as the answer to a heartbeat brings it.

    Attributes:
        known: false for a member that must join again.
        fenced: a newer learner has taken the run over from this one.
        learner: the learner's entry; None without one.
        policy: the version in force; None before the first.
        run_finished: the run has ended in order.
    """

    known: bool
    fenced: bool
    learner: pb.Member | None
    policy: PolicyVersion | None
    run_finished: bool


class Joined(NamedTuple):
    """A member's connection generation, and the number of the join that began it."""

    generation: int
    call: int


class MemberRegistry:
    """The members of one run."""

    def __init__(self, access: RedisAccess, keys: Keys) -> None:
        self._redis = access
        self._keys = keys
        self._entries: dict[bytes, _Entry] = {}

    async def join(self, member: pb.Member, *, call: int = 0, limit: int = 0) -> Joined | None:
        """Adds a member; None if the run has `limit` members.

        Args:
            call: grows with every join of a member, so that a late copy changes nothing; 0: not numbered.
            limit: most members of the run; 0: any number.
        """
        answer = await self._redis.run_script(
            "join", "", member.member_id, limit, member.SerializeToString(), call, member.role
        )
        return None if answer[0] == b"full" else Joined(int(answer[1]), int(answer[3]))

    async def heartbeat(self, request: pb.HeartbeatRequest, member_ttl_ms: int) -> MeshStatus:
        """Renews a member's leases and stores its status.

        Args:
            member_ttl_ms: for which a learner's right to the run is renewed.
        """
        answer = await self._redis.run_script(
            "heartbeat", "", request.member_id, request.generation, request.SerializeToString(),
            request.incarnation, member_ttl_ms,
        )  # fmt: skip
        known, fenced, learner, status, incarnation, version, finished = answer[1:8]
        return MeshStatus(
            known=bool(known),
            fenced=bool(fenced),
            learner=_member_with_status(learner, status) if learner else None,
            policy=PolicyVersion(incarnation, version) if incarnation else None,
            run_finished=bool(finished),
        )

    async def leave(self, member_id: str, generation: int, *, run_finished: bool = False) -> None:
        """Removes a member and ends its leases; `run_finished`: the run has ended in order."""
        await self._redis.run_script("leave", "", member_id, generation, int(run_finished))

    async def read_all(self) -> tuple[list[pb.Member], bool]:
        """All members with their last status and the age of their heartbeat; and whether the run has finished.

        Callers do not change the members.
        """
        keys = self._keys
        described, statuses, beats, time, finished = await self._redis.batch(
            [
                ("HGETALL", keys.members),
                ("HGETALL", keys.status),
                ("ZRANGE", keys.heartbeats, 0, -1, "WITHSCORES"),
                ("TIME",),
                ("HGET", keys.run, "finished"),
            ]
        )
        status, beat = _pairs(statuses), _pairs(beats)
        rows = [_Row(name, text, status.get(name), beat.get(name)) for name, text in _pairs(described).items()]
        self._entries = await self._parsed(rows, time)
        return _in_order(self._entries), bool(int(finished or 0))

    async def read_role(self, role: pb.Role) -> tuple[list[pb.Member], bool]:
        """The same of one role alone; costs nothing for all the other members."""
        keys = self._keys
        (names,) = await self._redis.batch([("SMEMBERS", keys.role(role))])
        of_names = [
            ("HMGET", keys.members, *names),
            ("HMGET", keys.status, *names),
            ("ZMSCORE", keys.heartbeats, *names),
        ]
        *found, time, finished = await self._redis.batch(
            [*(of_names if names else ()), ("TIME",), ("HGET", keys.run, "finished")]
        )
        rows = [_Row(*row) for row in zip(names, *found, strict=True) if row[1]] if names else []
        entries = await self._parsed(rows, time)
        return [member for member in _in_order(entries) if member.role == role], bool(int(finished or 0))

    async def _parsed(self, rows: Sequence[_Row], time: Sequence[bytes]) -> dict[bytes, _Entry]:
        """Members by id.

        One that has not said anything new is not parsed again. Others are parsed in portions, between which the event
        loop does other work.

        Args:
            rows: as Redis has them.
            time: of Redis, in seconds and microseconds, when they were read.
        """
        now_ms = int(time[0]) * 1000 + int(time[1]) // 1000
        before, entries, parsed = self._entries, {}, 0
        for row in rows:
            entry = before.get(row.name)
            if entry is None or entry.status != row.status or entry.description != row.description:
                entry = _Entry(row.description, row.status, _member_with_status(row.description, row.status))
                parsed += 1
                if parsed % _PARSED_AT_ONCE == 0:
                    await asyncio.sleep(0)
            entry.member.heartbeat_age_ms = max(0, now_ms - int(row.beat)) if row.beat is not None else 0
            entries[row.name] = entry
        return entries


def _pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _in_order(entries: Mapping[bytes, _Entry]) -> list[pb.Member]:
    """Members, those that have joined first at the beginning."""
    return sorted((entry.member for entry in entries.values()), key=lambda member: member.joined_unix_ms)


def _member_with_status(description: bytes, status: bytes | None) -> pb.Member:
    member = pb.Member.FromString(description)
    if status:
        heartbeat = pb.HeartbeatRequest.FromString(status)
        member.serving.CopyFrom(heartbeat.serving)
        for name, value in heartbeat.gauges.items():
            member.gauges[name] = value
        member.waiting_reason, member.wait_cause = heartbeat.waiting_reason, heartbeat.wait_cause
        member.endpoint = heartbeat.endpoint
    return member
