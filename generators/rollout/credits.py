"""Credits: the number of groups that a generator asks for.

Invariant: while the buffer grants, the engine's queue is never empty, so that a free slot is refilled in the next
decode step. No more groups than that are held: waiting groups grow stale, and are missing elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class InFlight:
    """The members that a generator has in progress.

    Attributes:
        generating: given to the engine, not finished yet.
        undelivered: finished, outcome not stored yet (being scored or written).
    """

    generating: int
    undelivered: int


def group_share(groups_per_step: int, max_staleness: int, replicas: int) -> int:
    """Groups that one of `replicas` equal generators should have in generation at most.

    The gate lets (S + 1) B groups live at once. Where that is little, the first to ask would take it all and leave
    the others idle.
    """
    return math.ceil(groups_per_step * (max_staleness + 1) / max(1, replicas))


def credits_for(load: InFlight, *, slots: int, n: int, share: int | None = None, limit: int | None = None) -> int:
    """Groups of `n` members that can be started beyond those in progress.

    Args:
        load: members held.
        slots: sequences decoded together.
        n: members per group.
        share: groups in generation above which others have precedence; none: no such bound.
        limit: sequences that the engine bears (`generators.rollout.concurrency`); none, or all slots: no such bound.

    The queue ahead of the engine is half a batch of slots, and at least one group. That is enough to refill slots that
    end together while the next grants travel. Where rewards or the buffer are slow, finished members pile up; above
    four batches of slots nothing more is taken on. Below its limit an engine decodes all its sequences, without a
    queue.
    """
    if load.undelivered > 4 * slots:
        return 0
    most = slots + max(n, slots // 2) if limit is None or limit >= slots else max(limit, n)
    groups = (most - load.generating) // n
    if share is not None:
        groups = min(groups, share - math.ceil(load.generating / n))
    return max(0, groups)
