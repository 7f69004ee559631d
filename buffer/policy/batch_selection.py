"""Chooses the ready groups of the next batch.

`in_order` takes ready groups by admission, and lets a group overtake a straggler (one still being generated) only
while the bound leaves the straggler room. Let d(g) be the last version that may train g. After a batch for version v
is chosen, the groups left with d(g) <= d can only train in the batches v+1 .. d, so

    for every d >= v:   #(left with deadline <= d)  <=  B * (d - v)

must hold. Solved for the batch: at least need(d) = live(d) - B * (d - v) groups with deadline <= d must be in it.
These demands are nested, so a greedy walk that keeps `need(d) <= free slots` for every d finds the earliest feasible
batch. Slots that only stragglers can fill stay free: the learner waits for them instead of dropping long answers.
If demands exceed the slots (after a loss of versions), the most urgent groups go first and nothing blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollmesh.buffer.policy.rules import Order, TableRules


@dataclass(frozen=True, slots=True)
class Candidate:
    """A ready group: its id, the last version that may train it, and its place in the order (low first)."""

    group_id: str
    deadline: int
    order: float


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """Facts of a ready group, for a user's score.

    Attributes:
        group_id: unique in the run.
        ordinal: position of its prompt in the data order.
        deadline: last version that may train it: `max_staleness` after its oldest token.
        uses: how often it has been trained.
        priority: as last set; 1 unless set.
        rewards: of its scored members.
        response_tokens: of its scored members, in the same order.
    """

    group_id: str
    ordinal: int
    deadline: int
    uses: int
    priority: float
    rewards: tuple[float, ...]
    response_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BatchCandidates:
    """Ready groups from which a batch for one version is chosen.

    Attributes:
        candidates: ready groups, the first of the order.
        live_by_deadline: as `choose_in_order` takes it.
        taken: groups leased for this version.
        earlier: groups leased for earlier versions.
    """

    candidates: tuple[Candidate, ...]
    live_by_deadline: tuple[int, ...]
    taken: int
    earlier: int


@dataclass(frozen=True, slots=True)
class Choice:
    """Groups to lease now.

    Attributes:
        group_ids: in the order they should train.
        reserved: ready groups passed over because the slots left are kept for more urgent ones.
    """

    group_ids: tuple[str, ...]
    reserved: int


def choose_first(candidates: Sequence[Candidate], *, version: int, slots: int) -> Choice:
    """The first `slots` groups of any order within the bound; no look at stragglers."""
    within = [c for c in sorted(candidates, key=lambda c: c.order) if c.deadline >= version]
    return Choice(tuple(c.group_id for c in within[:slots]), 0)


def choose_in_order(
    candidates: Sequence[Candidate],
    live_by_deadline: Sequence[int],
    *,
    version: int,
    groups_per_step: int,
    free: int,
    wanted: int,
) -> Choice:
    """Groups to add to the batch for `version`.

    Args:
        candidates: ready groups.
        live_by_deadline: [i] = live groups, ready or being generated and not leased, with a deadline of at most version
            + i.
        version: at which the batch trains (v).
        groups_per_step: B.
        free: slots of the batch that are not leased yet.
        wanted: groups asked for now; at most this many are returned.
    """
    needs = [max(0, live - groups_per_step * i) for i, live in enumerate(live_by_deadline)]
    chosen: list[str] = []
    passed = 0
    for candidate in sorted(candidates, key=lambda c: c.order):
        if len(chosen) >= min(free, wanted):
            break
        if candidate.deadline < version:
            continue
        index = candidate.deadline - version
        left_after = free - len(chosen) - 1
        if any(need > left_after for need in needs[:index]):
            passed += 1
            continue
        chosen.append(candidate.group_id)
        for i in range(index, len(needs)):
            needs[i] = max(0, needs[i] - 1)
    return Choice(tuple(chosen), passed)


def choose_batch(
    rules: TableRules, ready: BatchCandidates, *, version: int, wanted: int, u: int, first_deadline: int
) -> tuple[Choice, str]:
    """Groups to lease now, or an empty choice with the reason.

    Args:
        rules: of the table.
        ready: what there is to choose from.
        version: at which the batch trains.
        wanted: groups asked for now.
        u: version at which the next unclaimed batch will train.
        first_deadline: the least deadline among generating and ready groups.
    """
    if not rules.bounded:
        return choose_first(ready.candidates, version=version, slots=wanted), "no group is finished"
    if ready.earlier < rules.groups_per_step * (version - u):
        return Choice((), 0), f"the batch of version {u} is filled before that of version {version}"
    free = rules.groups_per_step - ready.taken
    if free <= 0:
        return Choice((), 0), f"the learner already has the whole batch of version {version}"
    if rules.order is not Order.IN_ORDER:
        choice = choose_first(ready.candidates, version=version, slots=min(free, wanted))
        return choice, "every finished group is too old (buffer.max_staleness)"
    choice = choose_in_order(
        ready.candidates,
        ready.live_by_deadline,
        version=version,
        groups_per_step=rules.groups_per_step,
        free=free,
        wanted=wanted,
    )
    if choice.reserved:
        return choice, (
            f"waits for stragglers: {choice.reserved} finished groups are held back, because others still being "
            f"generated must be trained by version {first_deadline} at the latest"
        )
    return choice, "every finished group is too old (buffer.max_staleness)"
