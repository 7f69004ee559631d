"""Absences by process, duration, leases held and rules: the full product, and a cover of its pairs.

Invariant: every pair of values of two dimensions that can occur together occurs in the cover
(`test_the_cover_holds_every_pair`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

Order = Literal["in_order", "fifo", "freshest", "priority", "score"]
# Whole processes stop for all runs together; links are cut for each run alone.
Stop = Literal["learner stops", "front stops", "generator stops"]
Break = Literal[
    "learner's link is cut", "learner's link is dark", "generator's link is cut", "generator's link is dark"
]
Fault = Literal[Stop, Break]
ORDERS: tuple[Order, ...] = get_args(Order)
STOPS: tuple[Stop, ...] = get_args(Stop)
BREAKS: tuple[Break, ...] = get_args(Break)
FAULTS: tuple[Fault, ...] = (*STOPS, *BREAKS)
STALENESS = (0, 1, 4)
REUSE = (1, 2)
FRONTS = (1, 2)
TERMS = (1.2, 1.5, 2.5)
GROUPS = 4
HELD = (1, GROUPS // 2, GROUPS - 1)


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of one run.

    Attributes:
        order, staleness, reuse: of the buffer.
        fronts: that serve it.
    """

    order: Order
    staleness: int
    reuse: int
    fronts: int

    def __str__(self) -> str:
        return f"{self.order}-S{self.staleness}-R{self.reuse}-F{self.fronts}"


@dataclass(frozen=True, slots=True)
class Case:
    """One absence.

    Attributes:
        rules: of the run.
        fault: what happens.
        terms: its length, in lease terms.
        held: groups of the next batch that the learner has when it begins, of `GROUPS`.
    """

    rules: Rules
    fault: Fault
    terms: float
    held: int

    @property
    def values(self) -> tuple[object, ...]:
        rules = self.rules
        return rules.order, rules.staleness, rules.reuse, rules.fronts, self.fault, self.terms, self.held

    def __str__(self) -> str:
        return f"{self.rules}: {self.fault} for {self.terms} terms, {self.held} of {GROUPS} held"


def all_rules() -> list[Rules]:
    """Every run that a configuration allows: the last use of a group is within the bound."""
    product = itertools.product(ORDERS, STALENESS, REUSE, FRONTS)
    return [Rules(*values) for values in product if values[2] <= values[1] + 1]


def rules_of_cover() -> list[Rules]:
    """Runs with every order under every bound; reuse and fronts take turns."""
    return [
        Rules(order, staleness, min(REUSE[(i + j) % 2], staleness + 1), FRONTS[(i + (j > 0)) % 2])
        for i, order in enumerate(ORDERS)
        for j, staleness in enumerate(STALENESS)
    ]


Round = list[Case]
"""Cases of different runs at the same time: of one stop with one length, or of breaks of any."""


def thirds_of_cover() -> list[list[Rules]]:
    """Parts of the cover's runs: one of every order in each, and every bound among them."""
    runs = rules_of_cover()
    return [[rules for i, rules in enumerate(runs) if (i + i // 3) % 3 == third] for third in range(3)]


def rounds_of_cover() -> Iterator[Round]:
    """Few rounds, each over a third of the runs: of a stop, so that each run meets each once, or of all breaks."""
    runs, thirds = rules_of_cover(), thirds_of_cover()
    for turn, (fault, terms) in enumerate(itertools.product(range(len(STOPS)), range(len(TERMS)))):
        third = thirds[(fault + terms) % 3]
        yield [Case(rules, STOPS[fault], TERMS[terms], HELD[(i + turn) % 3]) for i, rules in enumerate(third)]
    for shift, third in itertools.product(range(len(TERMS)), thirds):
        yield [
            Case(rules, BREAKS[(i + shift) % 4], TERMS[(i // 4 + shift) % 3], HELD[(i + 2 * shift) % 3])
            for i, rules in enumerate(runs)
            if rules in third
        ]


def rounds_of_product(runs: list[Rules]) -> Iterator[Round]:
    """Everything that may befall these runs."""
    for fault, terms, held in itertools.product(FAULTS, TERMS, HELD):
        yield [Case(rules, fault, terms, held) for rules in runs]


def pairs(cases: list[Case]) -> set[tuple[tuple[int, object], tuple[int, object]]]:
    """Pairs of values of two dimensions that occur together."""
    return {pair for case in cases for pair in itertools.combinations(enumerate(case.values), 2)}
