"""States and fates of a group, and what the contract remembers of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from buffer.policy.lineage import VersionRanges
from mesh.versions import PolicyVersion


class State(StrEnum):
    """Where a live group is. It is in exactly one of these."""

    GENERATING = "generating"
    READY = "ready"
    LEASED = "leased"
    CONSUMED = "consumed"


class Fate(StrEnum):
    """How a group ended. Exactly one per admitted group."""

    TRAINED = "trained"
    EVICTED_STALE = "evicted_stale"
    FILTERED = "filtered"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Task:
    """A pending prompt task, or the prompt of an ended group that was queued again.

    Attributes:
        ordinal: position in the data order.
        n: members.
        pin: the version that alone may take it, as text; empty for any.
        reserve: payload bytes to set aside.
        parent: the group whose eviction queued it again.
        refills: how often that has happened.
    """

    ordinal: int
    n: int
    pin: str = ""
    reserve: int = 0
    task_id: str = ""
    parent: str = ""
    refills: int = 0


@dataclass(slots=True)
class Group:
    """A live group.

    Attributes:
        seq: admission order.
        order: place among ready groups.
        holder: who holds the lease; empty while nobody does.
        lease: names the right to it; kept until the next grant, so that late work of the last holder still counts.
        attempt: counts its holders.
        lost: holders that were lost.
        grant: what the last holder served when it was granted.
        done: outcome stored, per member.
        ranges: versions of the tokens stored.
        deadline: last version that may train it.
    """

    group_id: str
    task: Task
    seq: int
    grant: PolicyVersion
    order: int = 0
    state: State = State.GENERATING
    holder: str = ""
    lease: str = ""
    attempt: int = 0
    lost: int = 0
    orphan: bool = False
    done: list[bool] = field(default_factory=list)
    scored: int = 0
    bytes: int = 0
    ranges: VersionRanges = field(default_factory=VersionRanges)
    payloads: list[tuple[int, int]] = field(default_factory=list)
    deadline: int = 0
    for_version: int = 0
    train_version: int = 0
