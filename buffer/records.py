"""What goes into the verbs and comes out of them, typed: grants, writes, leases, and what the policy looks at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from buffer.drafts import DraftPlace, draft_places
from buffer.limits import INLINE_BYTES
from buffer.payloads import Place, places
from buffer.policy.order import Candidate, GroupFacts
from protos import trajectory_pb2 as trajectory


@dataclass(frozen=True, slots=True)
class Grant:
    """A generator's right to a group. `done` has one character per member, `1` where an outcome is stored.

    `drafts` are what earlier holders had sampled of members that are not done.
    """

    group_id: str
    lease_id: str
    attempt: int
    ordinal: int
    done: str
    parent: str
    drafts: tuple[DraftPlace, ...]


@dataclass(frozen=True, slots=True)
class Write:
    """A member's outcome, checked.

    `meta` is the serialized MemberMeta; `ranges` the versions of its tokens; `size` the payload's bytes. A payload in
    `pieces` was uploaded before, and `payload` is empty. `tokens` are those of the response, where there is a payload;
    else `reason` says why not. A `draft` is the payload so far of a member that is not finished.
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

    @property
    def place(self) -> Place:
        return Place(self.member, self.attempt, self.pieces)


@dataclass(frozen=True, slots=True)
class Written:
    """What became of a write: status 1 stored, 2 duplicate, 3 superseded, 4 no such member."""

    status: int
    sealed: bool


@dataclass(frozen=True, slots=True)
class Leased:
    """A group leased to the learner."""

    group_id: str
    lease_id: str
    for_version: int
    ordinal: int
    attempt: int
    generating_ms: int
    queued_ms: int
    places: tuple[Place, ...]
    metas: tuple[bytes, ...]
    size: int
    use: int
    priority: float
    probability: float


@dataclass(frozen=True, slots=True)
class Sealed:
    """What a write of this front has just sealed, so that handing it on need not look for it.

    Attributes:
        rev: of the figures that the write left behind; any later change makes this stale.
        group_ids: in the order of sealing.
        values: payloads that this write stored, by (group id, member, attempt).
    """

    rev: int
    group_ids: tuple[str, ...]
    values: dict[tuple[str, int, int], bytes]

    def of(self, group: Leased) -> list[bytes | None] | None:
        """The group's payloads in order of their places; None unless it may travel whole and this write stored it."""
        if group.size > INLINE_BYTES:
            return None
        found = [self.values.get((group.group_id, place.member, place.attempt)) for place in group.places]
        return None if None in found else found


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the policy needs to choose a batch."""

    candidates: tuple[Candidate, ...]
    live_by_deadline: tuple[int, ...]
    taken: int
    earlier: int


def sealed_by(
    answer: Sequence[Any], writes: Sequence[Write], commands: Sequence[Sequence[Any]], replies: Sequence[Any]
) -> Sealed:
    """What a write of a front has sealed, from the answers to its commands and to its verb."""
    sealed = [w.group_id for w, result in zip(writes, answer[2], strict=True) if result[1]]
    if not sealed:
        return Sealed(answer[1][0], (), {})
    # A value is the stored one where its SET has found none before it.
    stored = {command[1] for command, reply in zip(commands, replies, strict=True) if reply == b"OK"}
    names = [command[1] for command in commands]
    whole = [w for w in writes if w.draft or (w.scored and not w.pieces)]
    values = {
        (w.group_id, w.member, w.attempt): w.payload
        for w, name in zip(whole, names, strict=True)
        if name in stored and not w.draft
    }
    return Sealed(answer[1][0], tuple(sealed), values)


def grant_of(item: Sequence[Any]) -> Grant:
    """As `admit` and `attach` answer it."""
    gid, lease, attempt, ordinal, done, parent, drafts = item
    return Grant(
        gid.decode(), lease.decode(), int(attempt), int(ordinal), done.decode(), parent.decode(), draft_places(drafts)
    )


def leased_of(item: Sequence[Any]) -> Leased:
    """As `sample` and `attach` answer it."""
    gid, lease, version, ordinal, attempt, generating, queued, payloads, metas, use, priority, chance, size = item
    return Leased(
        gid.decode(), lease.decode(), version, ordinal, attempt, generating, queued,
        places(payloads), tuple(metas), size, use, float(priority), float(chance),
    )  # fmt: skip


def facts_of(item: Sequence[Any]) -> GroupFacts:
    """As `facts` answers it."""
    gid, ordinal, deadline, uses, priority, metas = item
    members = [trajectory.MemberMeta.FromString(meta) for meta in metas if meta]
    scored = [member for member in members if member.outcome == trajectory.OUTCOME_SCORED]
    return GroupFacts(
        gid.decode(), ordinal, deadline, uses, float(priority),
        tuple(member.reward for member in scored), tuple(member.response_tokens for member in scored),
    )  # fmt: skip
