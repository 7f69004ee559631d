"""The balance of ranks where groups without a signal are left out of the training pass.

    python -m benchmarks.learner.balance                        # 64 groups of 8, 8 ranks
    python -m benchmarks.learner.balance --groups 1024 --ranks 64

Lengths are log-normal (median 1,800 tokens, up to 16,384), prompts of 300. In some groups all rewards are equal: they
have no advantage, and nothing of them is trained. Measured is what the slowest rank computes over what the mean one
does, forward and backward; means over batches. It is planned once on lengths alone, and once with the costs that
`Algorithm.expected_cost` derives from the rewards. Also: seconds for the plan, and prompts that a division of groups
doubles.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from benchmarks.common import table
from rollmesh.learner.algorithms.load import load_algorithm
from rollmesh.learner.algorithms.types import Group, UpdatePlan
from rollmesh.learner.batching.partition import sequence_cost
from rollmesh.learner.batching.plan import PlanItem, plan_batch

_PROMPT = 300
_BUDGET = 32_768


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan and what it costs.

    Attributes:
        uneven: work of the slowest rank over the mean.
        seconds: to plan.
        prompts: computed, per group that is trained.
    """

    uneven: float
    seconds: float
    prompts: float


def batch(rng: np.random.Generator, groups: int, size: int, silent: float) -> list[PlanItem]:
    """Items with the share of their cost that the algorithm expects."""
    algorithm = load_algorithm("grpo", {}, UpdatePlan(max_staleness=4, group_size=size))
    items = []
    for group in range(groups):
        lengths = np.clip(rng.lognormal(7.5, 0.8, size), 50, 16_384).astype(int)
        rewards = np.full(size, 1.0) if rng.random() < silent else (np.arange(size) % 2).astype(float)
        seen = Group(
            rewards=torch.from_numpy(rewards),
            scored=torch.ones(size, dtype=torch.bool),
            lengths=torch.from_numpy(lengths),
            truncated=torch.zeros(size, dtype=torch.bool),
        )
        share = algorithm.expected_cost(seen)
        items += [PlanItem(group, _PROMPT, int(length), share) for length in lengths]
    return items


def planned(items: Sequence[PlanItem], ranks: int, *, told: bool) -> Planned:
    """Plans; the work is that of the members that are trained, and of the prompts in front of them."""
    began = time.perf_counter()
    division = plan_batch(
        items if told else [replace(item, share=1.0) for item in items], token_budget=_BUDGET, ranks=ranks
    )
    seconds = time.perf_counter() - began
    work, prompts = [], 0
    for rank in division.minibatches[0]:
        trained = [index for micro in rank for index in micro if items[index].share == 1.0]
        own = len({items[index].group for index in trained})
        responses = sum(sequence_cost(items[index].response_tokens, _PROMPT) for index in trained)
        work.append(responses + own * sequence_cost(_PROMPT))
        prompts += own
    loud = len({item.group for item in items if item.share == 1.0})
    mean = sum(work) / len(work)
    return Planned(max(work) / mean if mean else 1.0, seconds, prompts / max(loud, 1))


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a row per share of silent groups."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learner.balance", description=__doc__)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--batches", type=int, default=20)
    args = parser.parse_args(argv)
    rng = np.random.default_rng(0)
    rows: list[tuple[object, ...]] = []
    for silent in (0.0, 0.5, 0.75, 0.9):
        batches = [batch(rng, args.groups, args.size, silent) for _ in range(args.batches)]
        row: list[object] = [f"{silent:.0%}"]
        for told in (False, True):
            found = [planned(items, args.ranks, told=told) for items in batches]
            row += [f"{np.mean([plan.uneven for plan in found]):.2f}"]
        row += [f"{np.mean([p.seconds for p in found]):.2f}", f"{np.mean([p.prompts for p in found]):.2f}"]
        rows.append(tuple(row))
    header = ("groups without a signal", "slowest / mean, by length", "with expected costs", "plan, s", "prompts")
    print(table(header, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
