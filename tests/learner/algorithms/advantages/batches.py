"""Random batches for the estimators' tests, and the settings under which every registered one is tried."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from rollmesh.learner.algorithms import advantages  # noqa: F401 - entering the registry
from rollmesh.learner.algorithms.ragged import expand
from rollmesh.learner.algorithms.registry import ADVANTAGES
from rollmesh.learner.algorithms.types import Estimate, Rollouts

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ADVANTAGES.names),
    ("grpo", {"normalize_by_std": False}),
    ("grpo", {"std": "batch"}),
    ("grpo", {"single": "zero", "epsilon": 0.0}),
    ("grpo_passk", {"normalize_by_std": False}),
    ("rloo", {"normalize_by_std": True}),
    ("gdpo", {"whiten": "sequences"}),
    ("gdpo", {"whiten": "none", "weights": {"style": 0.5}}),
    ("reinforce_plus_plus", {"gamma": 0.9}),
    ("reinforce_plus_plus_baseline", {"token_level": True}),
    ("gae", {"gamma": 0.95, "lam": 0.9}),
    ("vapo", {"whiten": True, "alpha": 2.0}),
    ("vtrace", {"lam": 0.9, "rho_bar": 2.0, "gamma": 0.9}),
    ("vtrace", {"alpha": 0.5}),
    ("optimal_token_baseline", {"handle_zero_tail": False}),
    ("prime", {"gamma": 0.9, "whiten": True}),
]


def variant_name(variant: tuple[str, dict[str, Any]]) -> str:
    name, settings = variant
    return "-".join([name, *(f"{key}={value}" for key, value in settings.items())])


def make_rollouts(
    lengths: list[int], groups: list[int], *, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Rollouts:
    """A batch with every optional field filled from random numbers."""
    generator = torch.Generator().manual_seed(seed)
    sequences, tokens = len(lengths), sum(lengths)

    def normal(size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)

    rewards = (torch.rand(sequences, generator=generator) < 0.5).to(dtype)
    log_probs = -normal(tokens).abs()
    return Rollouts(
        group_ids=torch.tensor(groups, dtype=torch.int64),
        rewards=rewards,
        lengths=torch.tensor(lengths, dtype=torch.int64),
        behaviour_log_probs=log_probs,
        staleness=torch.zeros(tokens, dtype=torch.int32),
        truncated=torch.zeros(sequences, dtype=torch.bool),
        components={"correct": rewards, "style": normal(sequences)},
        baseline_rewards=normal(sequences),
        token_rewards=0.1 * normal(tokens),
        proximal_log_probs=log_probs + 0.1 * normal(tokens),
        reference_log_probs=-normal(tokens).abs(),
        values=normal(tokens),
        sum_pi_squared=torch.rand(tokens, generator=generator, dtype=torch.float64).to(dtype),
        importance_weights=normal(tokens).exp().clamp_max(2.0),
        extra={"prm_log_probs": -normal(tokens).abs()},
    )


def shuffled(rollouts: Rollouts, order: list[int]) -> tuple[Rollouts, Tensor]:
    """The same sequences in another order, and the places [R] that their tokens had."""
    rows = torch.tensor(order, dtype=torch.int64)
    starts = (rollouts.lengths.cumsum(0) - rollouts.lengths).tolist()
    sizes = rollouts.lengths.tolist()
    places = torch.tensor([starts[row] + t for row in order for t in range(sizes[row])], dtype=torch.int64)
    by_token = {"behaviour_log_probs", "staleness", "token_rewards", "proximal_log_probs", "reference_log_probs"}
    by_token |= {"values", "sum_pi_squared", "importance_weights", "keep"}
    changes: dict[str, Any] = {
        "components": {name: value[rows] for name, value in rollouts.components.items()},
        "extra": {name: value[places] for name, value in rollouts.extra.items()},
    }
    for field in dataclasses.fields(rollouts):
        value = getattr(rollouts, field.name)
        if isinstance(value, Tensor):
            changes[field.name] = value[places if field.name in by_token else rows]
    return dataclasses.replace(rollouts, **changes), places


def run(variant: tuple[str, dict[str, Any]], rollouts: Rollouts) -> tuple[Tensor, Tensor]:
    """Advantages [R] and returns [R] (zeros without a critic) of a registered estimator."""
    name, settings = variant
    result = ADVANTAGES.get(name, "advantage").target(rollouts, **settings)
    if isinstance(result, Estimate):
        returns = torch.zeros_like(result.advantages) if result.returns is None else result.returns
        return result.advantages, returns
    assert result.shape == (rollouts.num_sequences,)
    values = expand(result, rollouts.lengths, rollouts.num_tokens)
    return values, torch.zeros_like(values)


@st.composite
def batches(draw: st.DrawFn, *, longest: int = 6) -> Rollouts:
    """A few sequences, some of them empty, in groups of one and more; possibly no sequence at all."""
    lengths = draw(st.lists(st.integers(0, longest), max_size=9))
    groups = draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    return make_rollouts(lengths, groups, seed=draw(st.integers(0, 2**16)))
