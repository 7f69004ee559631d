"""Deals the groups that may be admitted to the waiting generators with the least outstanding work for their size.

No I/O and no clock. The load of a generator is its outstanding groups over those plus its credits, that is, over all it
would hold. Groups are dealt one by one to the least loaded, so that loads become equal from below. An idle generator
is served first; one that is twice as fast has free slots twice as often, and gets twice as many.

Only those that get something are woken, and a group costs O(log of those that wait). So an event costs the same with
ten generators and with thousands.

Invariants
  * No generator gets more than its credits; all groups are dealt while a generator that may have them waits.
  * A generator that gets a group was not more loaded, with what it got before, than any other that waits.
  * Of equally loaded generators, the one that has waited longer comes first.
  * Groups dealt and not asked for yet are dealt to no one else.
  * Where Redis has refused one generator, it is not asked again for others with the same version, until something
    changes.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from rollmesh.buffer.policy import gate
from rollmesh.buffer.policy.rules import TableRules
from rollmesh.buffer.store.table_snapshot import TableSnapshot
from rollmesh.mesh.trajectory.versions import PolicyVersion

# Groups that one generator is dealt at once.
_MOST_AT_ONCE = 64
# Entries of a queue that are kept whether or not they are in force.
_LEAST_KEPT = 64


@dataclass(slots=True, eq=False)
class GeneratorDemand:
    """The groups that a generator holds and can take; its stream keeps this up to date.

    Attributes:
        credits: groups it can start now.
        outstanding: groups it is sampling.
        serving: version that it serves.
        share: groups dealt to it for which it has not asked Redis yet.
        woken: set when it is dealt a share.
    """

    credits: int = 0
    outstanding: int = 0
    serving: PolicyVersion = field(default_factory=lambda: PolicyVersion(0, 0))
    share: int = 0
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    # When it began to wait, as a number that grows; and its entry among those that wait, 0 where it has none.
    _since: int = 0
    _entry: int = 0

    @property
    def load(self) -> float:
        """0 for an idle generator, 1 for a full one, with its share."""
        return (self.outstanding + self.share) / max(1, self.outstanding + self.credits)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Redis had less than was asked for by a generator of some version.

    Attributes:
        rev: revision of the table at which that was so.
        reason: in words.
    """

    rev: int
    reason: str


class _Queue:
    """Generators that wait with one version, the one to be served next first.

    An entry that is not in force any more leaves when it comes first. Where most of them are not, all such leave at
    once: offers that are renewed while the gate is closed would pile up.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, GeneratorDemand]] = []
        self._most = _LEAST_KEPT

    def __len__(self) -> int:
        """Number of entries, also of those that are not in force."""
        return len(self._heap)

    def push(self, demand: GeneratorDemand) -> None:
        """Adds an entry, which is the one in force from now on."""
        heapq.heappush(self._heap, (demand.load, demand._since, demand._entry, demand))
        if len(self._heap) > self._most:
            self._heap = [entry for entry in self._heap if entry[3]._entry == entry[2]]
            heapq.heapify(self._heap)
            self._most = max(_LEAST_KEPT, 2 * len(self._heap))

    def first(self) -> tuple[float, int] | None:
        """The rank of the first one, its load before the beginning of its wait; None where no one waits."""
        while self._heap and self._heap[0][3]._entry != self._heap[0][2]:
            heapq.heappop(self._heap)
        return self._heap[0][:2] if self._heap else None

    def pop(self) -> GeneratorDemand:
        """Removes the first one; `first` has found it."""
        return heapq.heappop(self._heap)[3]


class AdmissionDealer:
    """The waiting generators of one table at one front.

    Args:
        rules: of the table.
        on_offer: called when the waiting have changed, so that `deal` is due.
    """

    def __init__(self, rules: TableRules, on_offer: Callable[[], None] = lambda: None) -> None:
        self._rules = rules
        self.on_offer = on_offer
        self._waiting: dict[PolicyVersion, _Queue] = {}
        self._refusals: dict[PolicyVersion, Refusal] = {}
        self._dealt = 0
        self._numbers = itertools.count(1)

    def offer(self, demand: GeneratorDemand) -> None:
        """Enters a generator among those that wait, or brings its place up to date."""
        self.withdraw(demand)
        if demand.credits <= demand.share:
            return
        if not demand._since:
            demand._since = next(self._numbers)
        self._enter(demand)
        self.on_offer()

    def withdraw(self, demand: GeneratorDemand) -> None:
        """Takes a generator out of those that wait; a share that it was dealt stays its own."""
        demand._entry = 0

    def settle(self, demand: GeneratorDemand) -> None:
        """Ends the share of a generator: it has asked Redis for it, or will not."""
        if demand.share:
            self._dealt -= demand.share
            demand.share = demand._since = 0
            self.on_offer()

    def refuse(self, serving: PolicyVersion, refusal: Refusal) -> None:
        """Records that Redis had less than was asked for."""
        self._refusals[serving] = refusal

    def refusal(self, serving: PolicyVersion, snapshot: TableSnapshot) -> Refusal | None:
        """The refusal that holds for a version until the table changes, if there is one."""
        found = self._refusals.get(serving)
        return found if found is not None and found.rev == snapshot.rev else None

    def forget_refusals(self) -> None:
        """Lets Redis be asked again although nothing has changed as far as is known."""
        self._refusals.clear()

    def room(self, snapshot: TableSnapshot, serving: PolicyVersion) -> int:
        """Groups that generators of a version might be granted, were there no others."""
        rules = self._rules
        if serving.incarnation != snapshot.incarnation or snapshot.suspect:
            return 0
        room = snapshot.pending
        if rules.bounded:
            limit = gate.live_limit(snapshot.u, serving.version, rules.groups_per_step, rules.max_staleness)
            room = min(room, max(0, limit - snapshot.demand) // rules.samples_per_insert)
        return room + snapshot.orphaned

    def deal(self, snapshot: TableSnapshot) -> list[GeneratorDemand]:
        """Deals what may be admitted, and wakes those that get something; returns them."""
        rooms = {
            serving: self.room(snapshot, serving)
            for serving in self._waiting
            if self.refusal(serving, snapshot) is None
        }
        # In the order in which they are served; none of them twice.
        served: dict[GeneratorDemand, None] = {}
        while (queue := self._least_loaded(rooms)) is not None:
            demand = queue.pop()
            demand.share += 1
            self._dealt += 1
            served[demand] = None
            if demand.share < min(demand.credits, _MOST_AT_ONCE):
                self._enter(demand)
            else:
                demand._entry = 0
        for demand in served:
            demand.woken.set()
        return list(served)

    def _least_loaded(self, rooms: dict[PolicyVersion, int]) -> _Queue | None:
        """The queue of the generator that comes next, of the versions for which there is room."""
        best: tuple[tuple[float, int], _Queue] | None = None
        for serving, queue in list(self._waiting.items()):
            rank = queue.first()
            if rank is None:
                del self._waiting[serving]
            elif rooms.get(serving, 0) > self._dealt and (best is None or rank < best[0]):
                best = rank, queue
        return None if best is None else best[1]

    def _enter(self, demand: GeneratorDemand) -> None:
        demand._entry = next(self._numbers)
        self._waiting.setdefault(demand.serving, _Queue()).push(demand)
