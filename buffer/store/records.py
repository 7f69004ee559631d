"""Typed arguments and answers of the scripts: grants, writes, leased groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from rollmesh.buffer.policy.batch_selection import GroupFacts
from rollmesh.buffer.store.drafts import DraftRef, parse_draft_refs
from rollmesh.buffer.store.payloads import PayloadRef, name_of, parse_payload_refs
from rollmesh.protos import buffer_pb2 as pb
from rollmesh.protos import trajectory_pb2 as trajectory


@dataclass(frozen=True, slots=True)
class GroupGrant:
    """A generator's right to a group. `done` has one character per member, `1` where an outcome is stored.

    `prompt` names its prompt; `drafts` are what earlier holders had sampled of members that are not done.
    """

    group_id: str
    lease_id: str
    attempt: int
    prompt: str
    done: str
    parent: str
    drafts: tuple[DraftRef, ...]


@dataclass(slots=True)  # not frozen: that doubles the time of making one
class Write:
    """A member's outcome, checked.

    `meta` is the serialized MemberMeta; `ranges` the versions of its tokens; `size` the payload's bytes. A payload in
    `pieces` was uploaded before, and `payload` is empty. `tokens` are those of the response, where there is a payload;
    else `reason` says why not. `side` names its large data. A `draft` is the payload so far of a member that is
    not finished. `digest` is that of the payload, where there is one.
    """

    group_id: str
    lease_id: str
    attempt: int
    member: int
    scored: bool
    payload: bytes
    ranges: str
    meta: bytes
    size: int
    pieces: int = 0
    tokens: int = 0
    reason: str = ""
    draft: bool = False
    digest: str = ""
    side: Sequence[trajectory.SideData] = ()

    @property
    def payload_ref(self) -> PayloadRef:
        return PayloadRef(name_of(self.member, self.attempt, self.digest), self.pieces)


class MemberState(IntEnum):
    """The state of a member for its holder, as `member_state` answers."""

    OPEN = 1
    STORED = 2
    RIGHT_LOST = 3
    NO_SUCH_MEMBER = 4


@dataclass(frozen=True, slots=True)
class WriteOutcome:
    """Outcome of a write. It is rejected if the group does not have the member.

    Attributes:
        status: of the member.
        sealed: its group, by this write.
        failed: the group, where too few of its members were scored when it was sealed.
    """

    status: pb.WriteStatus
    sealed: bool
    failed: EndedGroup | None = None

    @property
    def stored(self) -> bool:
        return self.status == pb.WRITE_STATUS_STORED


@dataclass(frozen=True, slots=True)
class EndedGroup:
    """A group that ended untrained in the buffer, `age_ms` after its admission."""

    group_id: str
    members: int
    age_ms: int
    reason: str


@dataclass(frozen=True, slots=True)
class Leased:
    """A group leased to the learner."""

    group_id: str
    lease_id: str
    for_version: int
    prompt: str
    attempt: int
    generating_ms: int
    queued_ms: int
    payload_refs: tuple[PayloadRef, ...]
    metas: tuple[bytes, ...]
    size: int
    use: int
    priority: float
    probability: float


def grant_from_reply(item: Sequence[Any]) -> GroupGrant:
    """Reads an item of the answers of `admit` and `attach`."""
    gid, lease, attempt, prompt, done, parent, drafts = item
    return GroupGrant(
        gid.decode(),
        lease.decode(),
        int(attempt),
        prompt.decode(),
        done.decode(),
        parent.decode(),
        parse_draft_refs(drafts),
    )


def leased_from_reply(item: Sequence[Any]) -> Leased:
    """Reads an item of the answers of `sample` and `attach`."""
    gid, lease, version, prompt, attempt, generating, queued, payloads, metas, use, priority, chance, size = item
    return Leased(
        gid.decode(), lease.decode(), version, prompt.decode(), attempt, generating, queued,
        parse_payload_refs(payloads), tuple(metas), size, use, float(priority), float(chance),
    )  # fmt: skip


def facts_from_reply(item: Sequence[Any]) -> GroupFacts:
    """Reads an item of the answer of `group_facts`."""
    gid, ordinal, deadline, uses, priority, metas = item
    members = [trajectory.MemberMeta.FromString(meta) for meta in metas if meta]
    scored = [member for member in members if member.outcome == trajectory.OUTCOME_SCORED]
    return GroupFacts(
        gid.decode(), ordinal, deadline, uses, float(priority),
        tuple(member.reward for member in scored), tuple(member.response_tokens for member in scored),
    )  # fmt: skip
