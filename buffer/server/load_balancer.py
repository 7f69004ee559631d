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
class Wish:
    """What a generator holds and wants; its stream keeps it up to date.

    Attributes:
        credits: groups it can start now.
        outstanding: groups it is sampling.
        refused_at: revision of the table's figures at which Redis gave it less than it asked for; until they change
            it takes no part.
        serving: version that it serves.
        answers: whether it answers on its stream; else it takes no part.
    """

    credits: int = 0
    outstanding: int = 0
    refused_at: int = -1
    serving: PolicyVersion = field(default_factory=lambda: PolicyVersion(0, 0))
    answers: bool = True

    @property
    def load(self) -> float:
        """0 for an idle generator, 1 for a full one."""
        return self.load_with(0)

    def load_with(self, given: int) -> float:
        """What it would be with so many groups more."""
        return (self.outstanding + given) / max(1, self.outstanding + self.credits)


def share_of(wish: Wish, all_wishes: Iterable[Wish], available: int, *, rev: int) -> int:
    """Groups that one of several generators should take.

    Args:
        wish: whose share; one of all.
        all_wishes: by the order in which they began to wait.
        available: groups that may be admitted.
        rev: of the figures that say so.
    """
    if not wish.credits:
        return 0
    rivals = (other for other in all_wishes if other.credits and other.answers)
    wishes = [other for other in rivals if other is wish or other.refused_at != rev]
    if sum(other.credits for other in wishes) <= available:
        return wish.credits
    given = [0] * len(wishes)
    line = [(other.load, place) for place, other in enumerate(wishes)]
    heapq.heapify(line)
    for _ in range(available):
        _, place = heapq.heappop(line)
        given[place] += 1
        other = wishes[place]
        if given[place] < other.credits:
            heapq.heappush(line, (other.load_with(given[place]), place))
    return next(count for count, other in zip(given, wishes, strict=True) if other is wish)
