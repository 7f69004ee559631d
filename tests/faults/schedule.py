"""The faults and their times: a pure function of the seed.

Faults come as cards of a deck that holds every kind on every target. The deck is shuffled by the seed, dealt to its end
and shuffled again, so that every kind is dealt equally often whatever the seed. A round is one card, or two that
overlap. Rounds follow one another when the mesh trains again, so that times are relative to the round.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from rollmesh.learner.placement.swap import TO_GENERATING, TO_TRAINING, Phase
from tests.faults.moments import Moment
from tests.faults.world import FRONT, FRONTS, GENERATORS, LEARNER, REDIS, REWARDS

Kind = Literal[
    "kill", "stop_short", "stop_long", "slow", "cut", "blackhole_short", "blackhole_long", "delay", "throttle",
    "away_cut", "away_stop", "gil", "lost_tail", "old_snapshot", "emptied", "kill_fronts", "rank_stop", "rank_dead",
    "rank_kill", "rank_cut", "zombie", "usurped", "kill_all", "turn_kill", "turn_stop",
]  # fmt: skip
LINKS = frozenset({"cut", "blackhole_short", "blackhole_long", "delay", "throttle", "away_cut"})
# A learner of two ranks is started for these; the first two leave it as it is, the others end it.
RANKS = frozenset({"rank_stop", "rank_dead", "rank_kill", "rank_cut"})
# Kinds that concern the whole mesh or who leads it: they come alone.
ALONE = RANKS | {"kill_all", "zombie", "usurped", "old_snapshot", "emptied", "kill_fronts"}
_OVERLAPPING = 0.25
_IN_A_PHASE: tuple[Kind, ...] = ("turn_kill", "turn_stop")
_BETWEEN_RANKS: tuple[Kind, ...] = ("rank_stop", "rank_dead")
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
# Processes that are away from the buffer while a part of a batch is held, and the buffer from all.
AWAY_LINKS = (
    *((LEARNER, FRONT) for _ in range(2)),
    *((generator, FRONT) for generator in GENERATORS),
    ("*", FRONT),
    ("*", FRONTS[0]),
    ("*", REDIS),
)
AWAY = (LEARNER, LEARNER, *GENERATORS, FRONTS[0], FRONT, REDIS)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        kind: what is done.
        target: a service (`front`: all fronts), or an edge as (client, service).
        starts_s: after the round begins.
        lasts_s: until it is undone; 0 where there is nothing to undo. For a loss: the time whose writes are lost.
        ranks: of the learner that is started afterwards.
        pick: chooses among parts of the target (the rank to be killed).
        moment: that is waited for.
        phase: of the turns on shared devices, in which it strikes; empty: in any.
    """

    kind: Kind
    target: str | tuple[str, str]
    starts_s: float = 0.0
    lasts_s: float = 0.0
    ranks: int = 1
    pick: int = 0
    moment: Moment = "any"
    phase: str = ""

    @property
    def name(self) -> str:
        """Kind and kind of target, the unit of the statistics: `kill generator`, `cut generator>front`."""
        if self.target == "mesh":
            return self.kind
        if isinstance(self.target, str):
            target = "both fronts" if self.target == FRONT else _plain(self.target)
        else:
            client, service = self.target
            everyone = "everyone" if service in (FRONT, *FRONTS, REDIS) else "generators"
            target = f"{everyone if client == '*' else _plain(client)}>"
            target += "one front" if service in FRONTS else _plain(service)
        when = " in an evaluation" if self.moment == "round" else f" while {self.phase}" if self.phase else ""
        return f"{self.kind} {target}{when}"


@dataclass(frozen=True, slots=True)
class Round:
    """Faults that are put on the mesh together, and the rest before the next round in seconds."""

    faults: tuple[Fault, ...]
    rest_s: float


def _plain(service: str) -> str:
    return service.split("-")[0]


def schedule(
    seed: int, *, lease_s: float, evaluation: bool = False, kinds: frozenset[str] | None = None
) -> Iterator[Round]:
    """Endless rounds; equal for equal arguments.

    Args:
        seed: decides everything.
        lease_s: the lease term: `short` faults end before it, `long` ones after, `away` ones on either side.
        evaluation: evaluation rounds run; some faults wait for one.
        kinds: only these; none: all.
    """
    dice = random.Random(seed)
    waiting: list[Fault] = []
    while True:
        deck = [card for card in _deck(dice, lease_s, evaluation) if kinds is None or card.kind in kinds]
        dice.shuffle(deck)
        for card in deck:
            rest = round(dice.uniform(0.2, 1.5), 2)
            if card.kind in ("rank_kill", "rank_cut"):
                yield Round((Fault("kill", LEARNER, ranks=2),), rest)
                for kind in _BETWEEN_RANKS:
                    length = round(lease_s * dice.uniform(0.5, 3.0), 2)
                    yield Round((Fault(kind, LEARNER, lasts_s=length, pick=dice.randrange(2)),), rest)
            if card.kind in ALONE:
                yield Round((card,), rest)
            elif waiting:
                yield Round((waiting.pop(), card), rest)
            elif dice.random() < _OVERLAPPING and card.target != LEARNER:
                waiting.append(_begins_later(card, dice))
            else:
                yield Round((card,), rest)


def short(seed: int, *, lease_s: float) -> Iterator[Round]:
    """One round of each sort, in the seed's order: kills, a lost tail, who is away with a part of a batch, a zombie."""
    dice = random.Random(seed)

    def away() -> float:
        return round(lease_s * dice.uniform(1.2, 1.6), 2)

    rounds = [
        (Fault("kill", dice.choice(GENERATORS)), Fault("kill_fronts", "mesh", starts_s=0.3)),
        (_lost_tail(round(dice.uniform(0.1, 0.6), 2)), Fault("kill", dice.choice(REWARDS), starts_s=0.2)),
        (Fault("away_cut", (LEARNER, FRONT), lasts_s=away(), moment="partial"),),
        (
            Fault("away_cut", (dice.choice(GENERATORS), FRONT), lasts_s=away(), moment="partial"),
            Fault("cut", ("*", LEARNER), lasts_s=round(lease_s * dice.uniform(0.3, 1.0), 2)),
            Fault("gil", dice.choice(REWARDS), lasts_s=away()),
            Fault("away_stop", dice.choice((FRONT, LEARNER, *GENERATORS)), lasts_s=away(), moment="round"),
        ),
        (Fault("zombie", LEARNER),),
    ]
    dice.shuffle(rounds)
    return iter(Round(faults, 0.2) for faults in rounds)


def turns(seed: int, *, lease_s: float, step_s: float) -> Iterator[Round]:
    """Every process, killed and stopped in every phase of the turns on shared devices, in the seed's order; endless.

    Args:
        seed: decides everything.
        lease_s: the lease term; most stops end before it.
        step_s: the deadline of a step of a swap; some stops of a generator end after it.
    """
    dice = random.Random(seed)
    while True:
        deck = [
            Fault(
                kind,
                target,
                lasts_s=0.0 if kind == "turn_kill" else _stop_s(dice, target, lease_s, step_s),
                phase=phase,
            )
            for phase in Phase
            for target in (LEARNER, GENERATORS[0], GENERATORS[1], FRONT, REDIS, REWARDS[0])
            for kind in _IN_A_PHASE
        ]
        dice.shuffle(deck)
        for fault in deck:
            yield Round((fault,), round(dice.uniform(0.2, 1.0), 2))


def short_turns(seed: int, *, lease_s: float, step_s: float) -> tuple[list[Round], list[Round]]:
    """A few rounds of `turns`: both sides killed amid a swap in each direction, and each stopped once.

    The first half has a kill of either side, and a stop that ends a generator's part in the turn.
    """
    dice = random.Random(seed)
    to_training, to_generating = dice.sample(TO_TRAINING, 2), dice.sample(TO_GENERATING, 2)
    halves = (
        [
            Fault("turn_kill", LEARNER, phase=to_training[0]),
            Fault("turn_kill", GENERATORS[1], phase=to_generating[1]),
            Fault("turn_stop", GENERATORS[0], lasts_s=step_s * 1.3, phase=Phase.RELEASING),
        ],
        [
            Fault("turn_kill", LEARNER, phase=to_generating[0]),
            Fault("turn_kill", GENERATORS[0], phase=to_training[1]),
            Fault("turn_stop", LEARNER, lasts_s=lease_s * 0.5, phase=dice.choice(TO_GENERATING)),
        ],
    )
    for half in halves:
        dice.shuffle(half)
    first, second = ([Round((fault,), 0.2) for fault in half] for half in halves)
    return first, second


def _stop_s(dice: random.Random, target: str, lease_s: float, step_s: float) -> float:
    longer = target in GENERATORS and dice.random() < 0.5
    return round(step_s * dice.uniform(1.1, 1.4) if longer else lease_s * dice.uniform(0.3, 0.8), 2)


def _begins_later(fault: Fault, dice: random.Random) -> Fault:
    return replace(fault, starts_s=round(dice.uniform(0.2, 2.0), 2))


def _deck(dice: random.Random, lease_s: float, evaluation: bool) -> list[Fault]:
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
        *(Fault("away_cut", edge, lasts_s=between(0.5, 3.0), moment="partial") for edge in AWAY_LINKS),
        *(Fault("away_stop", target, lasts_s=between(0.5, 3.0), moment="partial") for target in AWAY),
        *(Fault("gil", reward, lasts_s=between(0.5, 2.0)) for reward in REWARDS),
        *(_lost_tail(round(dice.uniform(0.02, longest), 2)) for longest in (0.3, 0.3, 1.0, 2.0)),
        replace(_lost_tail(between(0.8, 2.5)), kind="old_snapshot"),
        Fault("emptied", REDIS),
        *(Fault("kill_fronts", "mesh") for _ in range(2)),
        Fault("rank_kill", LEARNER, pick=dice.randrange(2)),
        Fault("rank_cut", LEARNER),
        *(Fault("zombie", LEARNER) for _ in range(2)),
        Fault("usurped", LEARNER),
        *(Fault("kill_all", "mesh") for _ in range(2)),
        *(_in_an_evaluation(dice, lease_s) if evaluation else ()),
    ]


def _lost_tail(lost_s: float) -> Fault:
    return Fault("lost_tail", REDIS, lasts_s=lost_s, moment="partial")


def _in_an_evaluation(dice: random.Random, lease_s: float) -> list[Fault]:
    """Further faults that strike while a round of evaluation runs."""

    def length() -> float:
        return round(lease_s * dice.uniform(0.5, 3.0), 2)

    faults = [
        *(Fault("kill", service) for service in (*GENERATORS, FRONTS[0], REDIS, LEARNER, REWARDS[0])),
        *(Fault("away_stop", service, lasts_s=length()) for service in (*GENERATORS, LEARNER, FRONT)),
        *(Fault("away_cut", (client, FRONT), lasts_s=length()) for client in (*GENERATORS, LEARNER)),
        *(_lost_tail(round(dice.uniform(0.02, longest), 2)) for longest in (0.3, 2.0)),
    ]
    return [replace(fault, moment="round") for fault in faults]
