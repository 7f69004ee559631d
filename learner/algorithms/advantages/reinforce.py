"""REINFORCE with returns per token: ReMax, REINFORCE++ and its variant with the group's mean as baseline."""

from __future__ import annotations

from torch import Tensor

from rollmesh.learner.algorithms.advantages.normalization import Single, centre, with_singles
from rollmesh.learner.algorithms.advantages.returns import rewards_per_token, sequence_scores
from rollmesh.learner.algorithms.advantages.whitening import whiten as whitened
from rollmesh.learner.algorithms.ragged import discounted_returns, expand
from rollmesh.learner.algorithms.registry import register_advantage
from rollmesh.learner.algorithms.types import Estimate, Rollouts


@register_advantage("remax", needs=("baseline_rewards",))
def remax(rollouts: Rollouts) -> Estimate:
    """REINFORCE with the greedy response as baseline: A_t = sum_{s >= t} r_s - b (arXiv:2310.10505).

    Args:
        rollouts: the whole batch; b is `baseline_rewards` of the sequence, the reward of its group's greedy response.

    Returns:
        advantages [R].
    """
    assert rollouts.baseline_rewards is not None
    returns = discounted_returns(rewards_per_token(rollouts), 1.0, rollouts.lengths)
    return Estimate(returns - expand(rollouts.baseline_rewards.to(returns.dtype), rollouts.lengths, returns.numel()))


@register_advantage("reinforce_plus_plus")
def reinforce_plus_plus(rollouts: Rollouts, *, gamma: float = 1.0, whiten: bool = True) -> Estimate:
    """REINFORCE++: discounted reward to go, whitened over all tokens of the batch (arXiv:2501.03262).

    The KL penalty of every token (in `token_rewards`) counts for the tokens before it alone.

    Args:
        rollouts: the whole batch.
        gamma: discount per trained token; 1: the paper's.
        whiten: over the tokens that are kept; False: plain returns.

    Returns:
        advantages [R].
    """
    returns = discounted_returns(rewards_per_token(rollouts), gamma, rollouts.lengths)
    return Estimate(whitened(returns, keep=rollouts.keep) if whiten else returns)


@register_advantage("reinforce_plus_plus_baseline", group_size=2)
def reinforce_plus_plus_baseline(
    rollouts: Rollouts,
    *,
    whiten: bool = True,
    token_level: bool = False,
    single: Single = "reward",
) -> Estimate:
    """REINFORCE++ with baseline: r_i - mean_g at every token, whitened over the batch (arXiv:2501.03262).

    The mean reshapes rewards, the batch's deviation scales them: unlike a group's, it is not noisy.

    Args:
        rollouts: the whole batch.
        whiten: over the tokens that are kept.
        token_level: rewards of single tokens (KL penalty) are added to the advantage of their own token alone (slime).
            False: they are summed into the response's before the mean is subtracted (verl).
        single: before whitening, the advantage of a group of one: its reward (verl), or 0.

    Returns:
        advantages [R].
    """
    scores = rollouts.rewards if token_level else sequence_scores(rollouts)
    groups, count = rollouts.group_ids, rollouts.num_groups
    centred: Tensor = with_singles(centre(scores, groups, count), scores, groups, count, single)
    advantages = expand(centred, rollouts.lengths, rollouts.num_tokens)
    if token_level and rollouts.token_rewards is not None:
        advantages = advantages + rollouts.token_rewards
    return Estimate(whitened(advantages, keep=rollouts.keep) if whiten else advantages)
