"""Estimators with a critic: generalized advantage estimation, and VAPO's with decoupled, length-adaptive lambda."""

from __future__ import annotations

import torch
from torch import Tensor

from rollmesh.learner.algorithms.advantages.returns import following_values, generalized_advantages, rewards_per_token
from rollmesh.learner.algorithms.advantages.whitening import whiten as whitened
from rollmesh.learner.algorithms.ragged import expand
from rollmesh.learner.algorithms.registry import register_advantage
from rollmesh.learner.algorithms.settings import SettingsError
from rollmesh.learner.algorithms.types import Estimate, Rollouts


@register_advantage("gae", needs=("values",))
def gae(rollouts: Rollouts, *, gamma: float = 1.0, lam: float = 1.0, whiten: bool = True) -> Estimate:
    """Generalized advantage estimation over trained tokens (arXiv:1506.02438, eq. 16).

    A_t = delta_t + gamma lam A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t, V = 0 after the last token. Tokens that
    are not trained (tool output) are no steps: nothing is discounted over them.

    Args:
        rollouts: the whole batch.
        gamma: discount per token; 1: a response is one decision, however long.
        lam: 1 (default, as in verl): no bias from the critic; smaller: less variance.
        whiten: of the advantages over the tokens that are kept; the returns are as they were before.

    Returns:
        advantages [R], and returns A + V [R].
    """
    assert rollouts.values is not None
    advantages = _advantages(rollouts, rollouts.values, gamma, lam)
    returns = advantages + rollouts.values
    return Estimate(whitened(advantages, keep=rollouts.keep) if whiten else advantages, returns)


@register_advantage("vapo", needs=("values",))
def vapo(
    rollouts: Rollouts, *, gamma: float = 1.0, alpha: float = 0.05, critic_lam: float = 1.0, whiten: bool = False
) -> Estimate:
    """VAPO: lambda 1 for the critic's targets, a lambda that grows with the length for the actor (arXiv:2504.05118).

    Actor (sec. 4.2): lam = 1 - 1 / (alpha l) for a response of l trained tokens. So the weights lam^t of the errors sum
    to alpha l, a fixed share of the response. The reward at the end of a long response is not forgotten. For
    `l < 1 / alpha` the formula is negative; 0 takes its place. Critic (sec. 4.1): no decay, no bias.

    Args:
        rollouts: the whole batch.
        gamma: discount per token.
        alpha: share of the response over which errors are spread; the paper's 0.05.
        critic_lam: lambda of the returns; the paper's 1.
        whiten: of the advantages over the tokens that are kept; the paper names none.

    Returns:
        advantages [R], and returns [R].

    Raises:
        SettingsError: alpha is not positive.
    """
    assert rollouts.values is not None
    if alpha <= 0:
        raise SettingsError("advantage.alpha", f"expected a number > 0, got {alpha}")
    values = rollouts.values
    lam = expand(adaptive_lambda(rollouts.lengths, alpha, values.dtype), rollouts.lengths, rollouts.num_tokens)
    advantages = _advantages(rollouts, values, gamma, lam)
    returns = _advantages(rollouts, values, gamma, critic_lam) + values
    return Estimate(whitened(advantages, keep=rollouts.keep) if whiten else advantages, returns)


def adaptive_lambda(lengths: Tensor, alpha: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """VAPO's lambda by length, 1 - 1 / (alpha l) in [0, 1], float [S]; 0 for an empty sequence."""
    return (1.0 - 1.0 / (alpha * lengths.clamp_min(1).to(dtype))).clamp(0.0, 1.0)


def _advantages(rollouts: Rollouts, values: Tensor, gamma: float, lam: Tensor | float) -> Tensor:
    rewards = rewards_per_token(rollouts).to(values.dtype)
    following = following_values(values, rollouts.lengths)
    return generalized_advantages(rewards, values, following, rollouts.lengths, discounts=gamma, lam=lam)
