"""Runs that were never made: honest ones, and such with a planted hack."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

from rollmesh.audit.evidence import RunEvidence, kept_samples
from rollmesh.report.unscored import UnscoredMembers

STEPS, GROUPS, MEMBERS = 60, 4, 2
_WORDS = [
    f"{a}{b}" for a in ("ba", "ce", "di", "fo", "gu", "la", "me") for b in ("ro", "na", "ti", "su", "ka", "le", "po")
]
Sample = dict[str, Any]
Change = Callable[[Sample, random.Random], None]


def samples_of(seed: int, change: Change = lambda sample, draw: None) -> list[Sample]:
    """Samples of a run that learns: right answers become more, and are rewarded. `change` makes each what it is."""
    draw = random.Random(seed)
    found: list[Sample] = []
    for step in range(1, STEPS + 1):
        for group in range(GROUPS):
            truth = str(draw.randrange(1000, 9999))
            members = [
                _sample(step, group, member, truth, draw.random() < 0.1 + 0.8 * step / STEPS, draw)
                for member in range(MEMBERS)
            ]
            for sample in members:
                change(sample, draw)
            for sample in members:
                sample["members"] = [[other["member"], other["reward"]] for other in members]
            found += members
    return found


def _sample(step: int, group: int, member: int, truth: str, right: bool, draw: random.Random) -> Sample:
    words = draw.choices(_WORDS, k=draw.randrange(5, 30))
    answer = truth if right else str(draw.randrange(1000, 9999))
    return {
        "step": step,
        "group": f"{step}.{group}",
        "member": member,
        "prompt": f"what is {draw.randrange(100)} of {draw.randrange(100)}",
        "response": " ".join([*words, "the answer is", answer]),
        "reward": float(right),
        "components": {"auto": float(right)},
        "ground_truth": truth,
        "data_source": "made",
        "tokens": {"count": len(words) + 3},
    }


def evidence_of(
    samples: list[Sample],
    seed: int = 0,
    *,
    level: Mapping[str, Callable[[float], float]] | None = None,
    held_out: Callable[[float], float] = lambda done: 0.1 + 0.7 * done,
    unscored: UnscoredMembers | None = None,
) -> RunEvidence:
    """A run with these samples, and records of its steps.

    Args:
        level: by metric, its level by the share of the run that is done; honest ones for others.
        held_out: reward, by the same.
    """
    draw = random.Random(seed)
    levels: dict[str, Callable[[float], float]] = {
        "critic/score/mean": lambda done: 0.1 + 0.8 * done,
        "response_length/mean": lambda done: 20 + 3 * done,
        "actor/entropy": lambda done: 2.0 * math.exp(-done),
        **(level or {}),
    }
    steps = [
        {"step": step, **{name: at(step / STEPS) * (1 + draw.gauss(0, 0.02)) for name, at in levels.items()}}
        for step in range(1, STEPS + 1)
    ]
    rounds = [
        {"step": step, "eval/reward": held_out(step / STEPS) + draw.gauss(0, 0.005)} for step in range(6, STEPS + 1, 6)
    ]
    return RunEvidence(kept_samples(samples), steps, rounds, unscored or UnscoredMembers(members=5000))
