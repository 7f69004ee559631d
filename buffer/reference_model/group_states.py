"""States and fates of a group, and what the contract remembers of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from rollmesh.buffer.policy.draw_weights import WEIGHT_UNIT
from rollmesh.buffer.policy.version_ranges import VersionRanges
from rollmesh.mesh.trajectory.versions import PolicyVersion

# By so much ids, leases and attempts jump ahead after a loss, so that none that was given in the lost time comes again.
ID_GAP_AFTER_LOSS = 1 << 20


class GroupState(StrEnum):
    """State of a live group; it is in exactly one."""

    GENERATING = "generating"
    READY = "ready"
    LEASED = "leased"
    CONSUMED = "consumed"


class Fate(StrEnum):
    """End of a group; exactly one per admitted group."""

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
        digest: of the prompt's bytes.
    """

    ordinal: int
    n: int
    pin: str = ""
    reserve: int = 0
    task_id: str = ""
    parent: str = ""
    refills: int = 0
    digest: str = ""


@dataclass(slots=True)
class Group:
    """A live group.

    Attributes:
        seq: admission order.
        order: place among ready groups, low first.
        seal: number of its sealing, where the order asks for it.
        holder: the member that holds the lease; empty without one.
        previous_holder: the holder that lost it last and may still work on it; empty once another one holds it.
        lease: names the right to it; kept until the next grant, so that late work of the last holder still counts.
        attempt: counts its holders; after a loss, from a multiple of `ID_GAP_AFTER_LOSS` on.
        lost: holders that were lost.
        grant: what the last holder served when it was granted.
        done: outcome stored, per member.
        ranges: versions of the tokens stored.
        deadline: last version that may train it.
        uses: train versions of its claims on the surviving lineage, ascending.
        tokens: response tokens stored.
        causes: what unscored members said, each once.
        claimed: the lease of its last claim.
        priority, weight: in weighted draws.
        prioritized: incarnation and number of the call that set them.
        draws: how often it has entered the race of weighted draws.
        chance: probability with which it was last drawn.
        payload_lost: it was used, but its payload is lost with state that Redis had acknowledged.
    """

    group_id: str
    task: Task
    seq: int
    grant: PolicyVersion
    order: float = 0
    seal: int = 0
    state: GroupState = GroupState.GENERATING
    holder: str = ""
    previous_holder: str = ""
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
    uses: list[int] = field(default_factory=list)
    tokens: int = 0
    causes: list[str] = field(default_factory=list)
    claimed: str = ""
    priority: float = 1.0
    weight: int = WEIGHT_UNIT
    prioritized: tuple[int, int] = (0, 0)
    draws: int = 0
    chance: float = 1.0
    payload_lost: bool = False

    @property
    def attempts(self) -> int:
        """Number of its grants, as far as the buffer knows."""
        return self.attempt % ID_GAP_AFTER_LOSS


def length_class(tokens: int) -> int:
    """The class by which evictions count a group of `tokens` tokens: the least power of two not below; 1 for none."""
    return 1 << max(0, tokens - 1).bit_length()
