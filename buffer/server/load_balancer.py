"""Who gets the groups that may be admitted: the generator with the least outstanding work for its size.

A pure chooser. The load of a generator is its outstanding groups over those plus its credits, that is, over all it
would hold. Groups are dealt one by one to the least loaded, so that loads become equal from below: an idle generator
is served first, and one that is twice as fast, and so has twice the room again and again, gets twice as many.

Invariants: nobody gets more than its credits; all that is available is dealt while somebody has credits; whoever gets
one was not more loaded, counting what it got before, than anybody with credits left. Of equals, who has waited longer
(an earlier place) comes first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from rollmesh.mesh.trajectory.versions import PolicyVersion


@dataclass(slots=True, eq=False)
class GeneratorDemand:
    """What a generator holds and wants; its stream keeps it up to date.

    Attributes:
        credits: groups it can start now.
        outstanding: groups it is sampling.
        refused_at: revision of the table's figures at which Redis gave it less than it asked for; until they change
            it takes no part.
        serving: version that it serves.
        is_responsive: whether it answers on its stream; else it takes no part.
    """

    credits: int = 0
    outstanding: int = 0
    refused_at: int = -1
    serving: PolicyVersion = field(default_factory=lambda: PolicyVersion(0, 0))
    is_responsive: bool = True

    @property
    def load(self) -> float:
        """0 for an idle generator, 1 for a full one."""
        return self.load_after(0)

    def load_after(self, given: int) -> float:
        """What it would be with so many groups more."""
        return (self.outstanding + given) / max(1, self.outstanding + self.credits)


def fair_share(demand: GeneratorDemand, all_demands: Iterable[GeneratorDemand], available: int, *, rev: int) -> int:
    """Groups that one of several generators should take.

    Args:
        demand: whose share; one of all.
        all_demands: by the order in which they began to wait.
        available: groups that may be admitted.
        rev: of the figures that say so.
    """
    if not demand.credits:
        return 0
    rivals = (other for other in all_demands if other.credits and other.is_responsive)
    demands = [other for other in rivals if other is demand or other.refused_at != rev]
    if sum(other.credits for other in demands) <= available:
        return demand.credits
    given = [0] * len(demands)
    queue = [(other.load, place) for place, other in enumerate(demands)]
    heapq.heapify(queue)
    for _ in range(available):
        _, place = heapq.heappop(queue)
        given[place] += 1
        other = demands[place]
        if given[place] < other.credits:
            heapq.heappush(queue, (other.load_after(given[place]), place))
    return next(count for count, other in zip(given, demands, strict=True) if other is demand)
