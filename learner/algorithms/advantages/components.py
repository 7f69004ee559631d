"""Several reward components: one sum, or each normalized by itself.

A component that does not apply to a response is NaN there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from rollmesh.learner.algorithms.advantages.normalization import Single, normalize
from rollmesh.learner.algorithms.advantages.returns import sequence_scores
from rollmesh.learner.algorithms.advantages.whitening import whiten as whitened
from rollmesh.learner.algorithms.ragged import expand
from rollmesh.learner.algorithms.registry import register_advantage
from rollmesh.learner.algorithms.settings import SettingsError
from rollmesh.learner.algorithms.types import Estimate, Rollouts


@register_advantage("gdpo", needs=("components",), group_size=2)
def gdpo(
    rollouts: Rollouts,
    *,
    weights: dict[str, float] | None = None,
    epsilon: float = 1e-6,
    whiten: Literal["tokens", "sequences", "none"] = "tokens",
    whiten_epsilon: float | None = None,
    single: Single = "reward",
) -> Tensor | Estimate:
    """Group reward-decoupled normalization: A_i = sum_k w_k (r_ki - mean_g(r_k)) / (std_g(r_k) + epsilon), whitened.

    arXiv:2601.05242. Normalizing each component by itself keeps apart rewards that a sum mixes up:
    (0, 2) and (1, 1) have equal sums. The last whitening keeps the scale independent of the number of components.

    Args:
        rollouts: the whole batch; without components its reward is the only one.
        weights: of the components by name; those not named are left out. None: all of them, with weight 1.
        epsilon: added to the groups' deviations (Bessel-corrected).
        whiten: over all tokens of the batch (verl), over its sequences (the paper, TRL), or none.
        whiten_epsilon: None: 1e-8 added to the variance for tokens (verl), 1e-4 added to the deviation for
            sequences (TRL).
        single: the normalized component of a group of one: its reward (verl), or 0.

    Returns:
        An estimate [R] with `whiten: tokens`, else float [S].

    Raises:
        SettingsError: a weight for a component that is not there.
    """
    named = dict(rollouts.components) or {"reward": sequence_scores(rollouts)}
    rewards = torch.stack([named[name] for name in _chosen(named, weights)])
    scales = rewards.new_tensor([1.0] * len(named) if weights is None else list(weights.values()))
    normalized = [
        normalize(row, rollouts.group_ids, rollouts.num_groups, epsilon=epsilon, single=single) for row in rewards
    ]
    total = (scales[:, None] * torch.stack(normalized)).sum(0)
    if whiten == "none":
        return total
    if whiten == "sequences":
        applies = ~rewards.isnan().all(0)
        guard = 1e-4 if whiten_epsilon is None else whiten_epsilon
        return torch.where(applies, whitened(total, keep=applies, epsilon=guard, guard="deviation"), 0.0)
    tokens = expand(total, rollouts.lengths, rollouts.num_tokens)
    guard = 1e-8 if whiten_epsilon is None else whiten_epsilon
    return Estimate(whitened(tokens, keep=rollouts.keep, epsilon=guard))


def combine(components: Tensor, weights: Tensor) -> Tensor:
    """sum_k w_k r_k over the components that apply, [S]; NaN where none does.

    Args:
        components: float [K, S], NaN where one does not apply.
        weights: float [K].
    """
    total = (weights[:, None] * components).nansum(0)
    return torch.where(components.isnan().all(0), torch.nan, total)


def _chosen(named: Mapping[str, Tensor], weights: Mapping[str, float] | None) -> list[str]:
    if weights is None:
        return list(named)
    if not weights:
        raise SettingsError(
            "advantage.weights", "names no component", hint="leave it out to give all of them the weight 1"
        )
    for name in weights:
        if name not in named:
            known = ", ".join(named)
            raise SettingsError(f"advantage.weights.{name}", "no such reward component", hint=f"there are: {known}")
    return list(weights)
