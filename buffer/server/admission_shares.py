"""Deals the groups that may be admitted to the generators with the least outstanding work for their size.

A pure function. The load of a generator is its outstanding groups over those plus its credits, that is, over all it
would hold. Groups are dealt one by one to the least loaded, so that loads become equal from below. An idle generator
is served first; one that is twice as fast has free slots twice as often, and gets twice as many.

Invariants
  * No generator gets more than its credits; all groups are dealt while a generator has credits.
  * A generator that gets a group was not more loaded, with what it got before, than any other with credits left.
  * Of equally loaded generators, the one that has waited longer comes first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from rollmesh.mesh.trajectory.versions import PolicyVersion


@dataclass(slots=True, eq=False)
class GeneratorDemand:
    """The groups that a generator holds and can take; its stream keeps this up to date.

    Attributes:
        credits: groups it can start now.
        outstanding: groups it is sampling.
        refused_at: revision of the table at which Redis gave it less than it asked for; until that changes it takes no
            part.
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
        """The load after `given` further groups."""
        return (self.outstanding + given) / max(1, self.outstanding + self.credits)


def fair_share(demand: GeneratorDemand, all_demands: Iterable[GeneratorDemand], available: int, *, rev: int) -> int:
    """Number of groups that one of several generators should take.

    Args:
        demand: of the generator that gets the share; one of all.
        all_demands: by the order in which they began to wait.
        available: groups that may be admitted.
        rev: of the table's snapshot that has this number.
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
