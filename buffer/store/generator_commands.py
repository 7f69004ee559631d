"""Commands of generators: grants come out, outcomes and drafts of members go in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import msgpack

from rollmesh.buffer.protocol.leases import Lease
from rollmesh.buffer.redis_backend.access import RedisAccess
from rollmesh.buffer.redis_backend.connection import Argument
from rollmesh.buffer.store.commands import MAX_GROUPS_PER_CALL, CommandRunner, lease_arguments
from rollmesh.buffer.store.direct_handoff import Delivery, DirectHandoff, WaitingStream
from rollmesh.buffer.store.drafts import DraftRef
from rollmesh.buffer.store.errors import checked_answer
from rollmesh.buffer.store.payloads import SetValue, set_value
from rollmesh.buffer.store.records import (
    EndedGroup,
    GroupGrant,
    MemberState,
    Write,
    WriteOutcome,
    grant_from_reply,
    leased_from_reply,
)
from rollmesh.buffer.store.side_files import SideFileStore
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2 as pb

# Fields that the writes of one lease share.
_LEASE = attrgetter("group_id", "lease_id", "attempt", "ranges")
# The reason for a failure at the seal, as the ledger has it.
_TOO_FEW_SCORED = "too_few_scored"
# By the character with which the script answers.
_OUTCOMES = {
    ord("0"): WriteOutcome(pb.WRITE_STATUS_STORED, sealed=True),
    ord("1"): WriteOutcome(pb.WRITE_STATUS_STORED, sealed=False),
    ord("2"): WriteOutcome(pb.WRITE_STATUS_DUPLICATE, sealed=False),
    ord("3"): WriteOutcome(pb.WRITE_STATUS_SUPERSEDED, sealed=False),
    ord("4"): WriteOutcome(pb.WRITE_STATUS_REJECTED, sealed=False),
}


class Admission(NamedTuple):
    """The answer to a request for grants.

    Attributes:
        status: `ok`, or what keeps Redis from granting; `moved`: u is not what the proposal says.
        grants: given.
        why: they are not more.
        rev: revision of the table that the answer describes.
    """

    status: str
    grants: list[GroupGrant]
    why: str
    rev: int


class GeneratorCommands(CommandRunner):
    """Commands of generators.

    Attributes:
        handoff: leases what writes seal to the streams that wait for it.
    """

    def __init__(self, access: RedisAccess, run_name: str, side: SideFileStore) -> None:
        super().__init__(access, run_name, side)
        self.handoff = DirectHandoff(self._notify)

    async def admit(
        self,
        table: str,
        member_id: str,
        generation: int,
        serving: PolicyVersion,
        wanted: int,
        u: int,
        live_limit: int,
        token: str,
    ) -> Admission:
        """Asks for up to `wanted` grants."""
        answer = await self.redis.run_script(
            "admit", table, member_id, generation, serving.incarnation, serving.version, wanted, u, live_limit, token
        )
        self._update_snapshot(table, answer[1])
        status = answer[0].decode()
        if status in ("suspect", "moved", "other_incarnation"):
            return Admission(status, [], status, answer[1][0])
        checked_answer(answer)
        grants = [grant_from_reply(item) for item in answer[2]]
        return Admission(status, grants, answer[3].decode(), answer[1][0])

    async def attach_generator(self, table: str, member_id: str, generation: int, token: str) -> list[GroupGrant]:
        """Opens a generator's stream (again); returns the grants that it holds."""
        answer = await self._run("attach", table, member_id, generation, token)
        return [grant_from_reply(item) for item in answer[2]]

    async def detach(self, table: str, holder: str, token: str) -> None:
        """Ends a stream: its holder's leases are shortened, unless a newer stream is open."""
        await self._run("detach", table, holder, token)

    async def release(
        self, table: str, member_id: str, generation: int, leases: Sequence[Lease], token: str = ""
    ) -> int:
        """Gives up groups for a generator; with the token of a stream only while that is its present one."""
        answer = await self._run("release", table, member_id, generation, token, *lease_arguments(leases))
        return int(answer[2])

    async def read_cancellations(
        self, table: str, member_id: str, generation: int, acknowledged: Sequence[Lease]
    ) -> list[Lease]:
        """Leases of a member for groups that are not needed any more; those in `acknowledged` are forgotten."""
        entries = map(" ".join, acknowledged)
        answer = await self._run("read_cancellations", table, member_id, generation, MAX_GROUPS_PER_CALL, *entries)
        return [Lease(*entry.decode().split(" ")) for entry in answer[2]]

    async def cancelled_since(self, table: str, count: int) -> list[str]:
        """Members that work on groups which were cancelled when more than `count` had been, and may not know of it."""
        key = self.keys.table(table, "cancelled_at")
        (found,) = await self.redis.batch([("ZRANGEBYSCORE", key, f"({count}", "+inf")])
        return [member.decode() for member in found]

    async def write(self, table: str, writes: Sequence[Write]) -> list[WriteOutcome]:
        """Stores outcomes: one round trip, and a second one where something stored is not needed (any more)."""
        values, drafts, arguments = self._encoded(table, writes)
        verbs: list[Sequence[Argument]] = [("write", table, *arguments)]
        before = self.snapshots[table].rev
        with self.handoff.write_in_progress(table, writes) as stream:
            if stream is not None:
                groups = dict.fromkeys(w.group_id for w in writes)
                verbs.append(("sample", table, stream.incarnation, stream.version, stream.token, *groups))
            replies = await self.redis.run_all_after([*values, *drafts], verbs)
        sampled = replies.pop() if stream is not None else None
        answer = replies.pop()
        self._update_snapshot(table, answer[1])
        results = [_OUTCOMES[status] for status in answer[2]]
        for position, members, age_ms in answer[4]:
            failed = EndedGroup(writes[position].group_id, members, age_ms, _TOO_FEW_SCORED)
            results[position] = replace(results[position], failed=failed)
        sealed = [w.group_id for w, result in zip(writes, results, strict=True) if result.sealed]
        self.handoff.record_sealed(table, answer[1][0], sealed)
        if stream is not None and sampled is not None:
            self._deliver(table, stream, sampled, before)
        # After the delivery, which a failure must not hold back; a stream reads these values only after this turn.
        whole = [result.stored for w, result in zip(writes, results, strict=True) if w.scored and not w.pieces]
        self.payloads.cache.put([value[1:3] for value, stored in zip(values, whole, strict=True) if stored])
        await self._remove(table, writes, answer[3])
        return results

    def _encoded(self, table: str, writes: Sequence[Write]) -> tuple[list[SetValue], list[SetValue], list[bytes]]:
        """Commands that store payloads, those that store drafts, and the script's arguments."""
        values: list[SetValue] = []
        drafts: list[SetValue] = []
        arguments: list[bytes] = []
        # Equal fields are sent once: nearly all of them for the members of one lease.
        for (group_id, lease_id, attempt, ranges), members in groupby(writes, _LEASE):
            outcomes: list[str | bytes | int] = [group_id, lease_id, str(attempt), ranges]
            prefix = self.keys.payloads(table, group_id)
            for w in members:
                member = str(w.member)
                if w.draft:
                    ref = DraftRef(w.member, attempt, w.tokens, w.digest)
                    drafts.append(set_value(self.drafts.key(table, group_id, ref), w.payload))
                    outcomes += (member, f"-{w.digest}", w.size, w.tokens, w.meta)
                elif w.pieces:
                    outcomes += (member, f"{w.digest}:{w.pieces}", w.size, w.tokens, w.meta)
                elif w.scored:
                    values.append(set_value(f"{prefix}{member}:{attempt}:{w.digest}", w.payload))
                    outcomes += (member, w.digest, w.size, w.tokens, w.meta)
                else:
                    outcomes += (member, "", 0, w.reason, w.meta)
            arguments.append(packed(outcomes))
        return values, drafts, arguments

    def _deliver(self, table: str, stream: WaitingStream, sampled: Sequence[Any], before: int) -> None:
        """Hands groups that a write has leased to its stream; `before` is the revision when the write began."""
        self._update_snapshot(table, sampled[1])
        if sampled[1][0] < before:
            # Redis went back: this must not be trained on. The stream reopens, and learns what it holds.
            self.handoff.deliver(table, Delivery(stream, None))
        elif sampled[0] == b"ok" and sampled[2]:
            self.handoff.deliver(table, Delivery(stream, [leased_from_reply(item) for item in sampled[2]]))

    async def _remove(self, table: str, writes: Sequence[Write], useless: Sequence[Any]) -> None:
        """Removes the values that the script names: (index of the write, name of a draft or nothing), ..."""
        keys = []
        for index, name in zip(useless[::2], useless[1::2], strict=True):
            w = writes[index]
            keys += (self.drafts.keys_of if name else self.payloads.keys_of)(table, w.group_id, name or w.payload_ref)
        await self.redis.batch([("UNLINK", key) for key in keys])

    async def member_state(self, table: str, group_id: str, lease_id: str, attempt: int, member: int) -> MemberState:
        """The state of a member for its holder: may it be written?"""
        answer = await self._run("member_state", table, group_id, lease_id, attempt, member)
        return MemberState(answer[2])


def packed(values: list[str | bytes | int]) -> bytes:
    """Values, concatenated as a script unpacks them: a packed list without its head.

    All strings are raw ones, since scripts do not know those of bytes.
    """
    head = 1 if len(values) < 16 else 3 if len(values) < 1 << 16 else 5
    whole: bytes = msgpack.packb(values, use_bin_type=False)
    return whole[head:]
