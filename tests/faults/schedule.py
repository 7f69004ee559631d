"""Which faults happen when: a pure function of the seed.

Faults come as cards of a deck that holds every kind on every target; the deck is shuffled by the seed, dealt to its
end and shuffled anew, so that every kind is dealt equally often whatever the seed. A round is one card, or two that
overlap. Rounds follow one another when the mesh trains again, so that times are relative to the round.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tests.faults.world import FRONT, FRONTS, GENERATORS, LEARNER, REDIS, REWARDS

Kind = Literal[
    "kill", "stop_short", "stop_long", "slow", "cut", "blackhole_short", "blackhole_long", "delay", "throttle",
    "rank_stop", "rank_kill", "zombie", "usurped", "kill_all",
]  # fmt: skip
LINKS = frozenset({"cut", "blackhole_short", "blackhole_long", "delay", "throttle"})
# Kinds that concern the whole mesh or who leads it: they come alone.
_ALONE = frozenset({"kill_all", "zombie", "usurped", "rank_stop", "rank_kill"})
_OVERLAPPING = 0.25
EDGES = (
    *((generator, FRONT) for generator in GENERATORS),
    (GENERATORS[0], FRONTS[0]),
    (LEARNER, FRONT),
    (LEARNER, FRONTS[1]),
    (REWARDS[0], FRONT),
    *((front, REDIS) for front in FRONTS),
    ("*", LEARNER),
    (GENERATORS[1], LEARNER),
    ("*", REWARDS[0]),
    (GENERATORS[0], REWARDS[1]),
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        kind: what is done.
        target: a service, or an edge as (client, service).
        starts_s: after the round begins.
        lasts_s: until it is undone; 0 where there is nothing to undo.
        ranks: of the learner that is started afterwards.
        pick: chooses among parts of the target (the rank to be killed).
    """

    kind: Kind
    target: str | tuple[str, str]
    starts_s: float = 0.0
    lasts_s: float = 0.0
    ranks: int = 1
    pick: int = 0

    @property
    def name(self) -> str:
        """Kind and kind of target, the unit of the statistics: `kill generator`, `cut generator>front`."""
        ends = (self.target,) if isinstance(self.target, str) else self.target
        if self.target == "mesh":
            return self.kind
        if len(ends) == 2 and ends[1] in FRONTS:
            ends = (ends[0], "one front")
        plain = [end.split("-")[0].replace("*", "generators") for end in ends]
        return f"{self.kind} {'>'.join(plain)}"


@dataclass(frozen=True, slots=True)
class Round:
    """Faults that are put on the mesh together, and the rest before the next round in seconds."""

    faults: tuple[Fault, ...]
    rest_s: float


def schedule(seed: int, *, lease_s: float, kinds: frozenset[str] | None = None) -> Iterator[Round]:
    """Endless rounds; equal for equal arguments.

    Args:
        seed: decides everything.
        lease_s: the lease term: `short` faults end before it, `long` ones after.
        kinds: only these; none: all.
    """
    dice = random.Random(seed)
    waiting: list[Fault] = []
    while True:
        deck = [card for card in _deck(dice, lease_s) if kinds is None or card.kind in kinds]
        dice.shuffle(deck)
        for card in deck:
            rest = round(dice.uniform(0.2, 1.5), 2)
            if card.kind == "rank_kill":
                yield Round((Fault("kill", LEARNER, ranks=2),), rest)
                length = round(lease_s * dice.uniform(0.3, 1.8), 2)
                yield Round((Fault("rank_stop", LEARNER, lasts_s=length, pick=dice.randrange(2)),), rest)
            if card.kind in _ALONE:
                yield Round((card,), rest)
            elif waiting:
                yield Round((waiting.pop(), card), rest)
            elif dice.random() < _OVERLAPPING and card.target != LEARNER:
                waiting.append(_begins_later(card, dice))
            else:
                yield Round((card,), rest)


def short(seed: int, *, lease_s: float) -> Iterator[Round]:
    """One round of each sort, in the seed's order: a kill of every service, a partition, a zombie, an overlap."""
    dice = random.Random(seed)
    rounds = [
        (Fault("kill", dice.choice(GENERATORS)), Fault("kill", dice.choice(FRONTS), starts_s=0.3)),
        (Fault("kill", REDIS), Fault("kill", dice.choice(REWARDS), starts_s=0.2)),
        (Fault("blackhole_short", (LEARNER, FRONT), lasts_s=round(lease_s * dice.uniform(0.3, 0.7), 2)),),
        (
            Fault("blackhole_long", (dice.choice(GENERATORS), FRONT), lasts_s=round(1.5 * lease_s, 2)),
            Fault("cut", ("*", LEARNER), lasts_s=round(lease_s * dice.uniform(0.3, 1.0), 2)),
        ),
        (Fault("stop_long", dice.choice((*FRONTS, REDIS)), lasts_s=round(1.3 * lease_s, 2)),),
        (Fault("zombie", LEARNER),),
    ]
    dice.shuffle(rounds)
    return iter(Round(faults, 0.2) for faults in rounds)


def _begins_later(fault: Fault, dice: random.Random) -> Fault:
    return Fault(fault.kind, fault.target, round(dice.uniform(0.2, 2.0), 2), fault.lasts_s, fault.ranks, fault.pick)


def _deck(dice: random.Random, lease_s: float) -> list[Fault]:
    """One card for each kind on each target, with lengths of their own."""

    def between(low: float, high: float) -> float:
        return round(lease_s * dice.uniform(low, high), 2)

    def links(edge: tuple[str, str]) -> list[Fault]:
        return [
            Fault("cut", edge, lasts_s=between(0.1, 1.5)),
            Fault("blackhole_short", edge, lasts_s=between(0.2, 0.7)),
            Fault("blackhole_long", edge, lasts_s=between(1.3, 2.0)),
            Fault(dice.choice(("delay", "throttle")), edge, lasts_s=between(0.5, 1.0)),
        ]

    services = (*GENERATORS, *REWARDS, *FRONTS, REDIS)
    return [
        *(Fault("kill", service) for service in services),
        *(Fault("kill", LEARNER) for _ in range(3)),
        *(Fault("stop_short", service, lasts_s=between(0.2, 0.7)) for service in (*services, LEARNER)),
        *(Fault("stop_long", service, lasts_s=between(1.3, 2.0)) for service in (*services, LEARNER)),
        *(Fault("slow", service, lasts_s=between(0.5, 1.0)) for service in (*services, LEARNER)),
        *(fault for edge in EDGES for fault in links(edge)),
        *(Fault("rank_kill", LEARNER, pick=dice.randrange(2)) for _ in range(2)),
        *(Fault("zombie", LEARNER) for _ in range(2)),
        Fault("usurped", LEARNER),
        *(Fault("kill_all", "mesh") for _ in range(2)),
    ]
