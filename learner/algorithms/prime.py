"""PRIME: process rewards from an implicit reward model (arXiv:2502.01456).

A language model phi, trained as a classifier of outcomes through its log-ratio to a reference, has learned a reward of
every token beside it (arXiv:2412.01981): r_phi(y_t) = beta * log(phi(y_t) / ref(y_t)).
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import softplus

from learner.algorithms.advantages.normalization import centre
from learner.algorithms.advantages.returns import sequence_scores
from learner.algorithms.advantages.whitening import whiten as whitened
from learner.algorithms.metrics import Metrics
from learner.algorithms.numerics import log_ratio
from learner.algorithms.ragged import (
    discounted_returns,
    expand,
    segment_count,
    segment_sum,
    sequence_mean,
    sequence_sum,
)
from learner.algorithms.registry import register_advantage
from learner.algorithms.settings import SettingsError
from learner.algorithms.types import Estimate, GlobalCounts, LossOutput, Rollouts, TokenBatch


@register_advantage("prime", needs=("reference_log_probs",), group_size=2)
def prime(
    rollouts: Rollouts,
    *,
    beta: float = 0.05,
    gamma: float = 1.0,
    process_weight: float = 1.0,
    outcome_weight: float = 1.0,
    whiten: bool = False,
) -> Estimate:
    """Returns of centred process rewards plus RLOO on the outcome (arXiv:2502.01456, eq. 5).

    A_it = sum_{s >= t} gamma^(s-t) (r_phi(y_is) - mean_{j != i} r_phi(y_j)) + r_o(y_i) - mean_{j != i} r_o(y_j),
    where r_phi(y_j) is the mean process reward over the tokens of response j: the baselines leave one out, too.

    Args:
        rollouts: the whole batch; `extra["prm_log_probs"]` [R] are the implicit reward model's log-probs.
        beta: scale of the process rewards; the paper's 0.05.
        gamma: discount per token of the process rewards; the paper's 1.
        process_weight: of the first sum.
        outcome_weight: of the outcome's part.
        whiten: over the tokens that are kept; the paper names none.

    Returns:
        advantages [R]. In a group of one (or where the others are empty) the outcome's part and the baseline are 0.

    Raises:
        SettingsError: there is no implicit reward model.
    """
    assert rollouts.reference_log_probs is not None
    if "prm_log_probs" not in rollouts.extra:
        raise SettingsError(
            "advantage", "'prime' needs the log-probs of an implicit reward model", hint="use algorithm: prime"
        )
    lengths, total = rollouts.lengths, rollouts.num_tokens
    rewards = process_rewards(rollouts.extra["prm_log_probs"], rollouts.reference_log_probs, beta)
    baselines = others_mean(sequence_mean(rewards, lengths), lengths > 0, rollouts.group_ids, rollouts.num_groups)
    process = discounted_returns(rewards - expand(baselines, lengths, total), gamma, lengths)
    outcome = centre(sequence_scores(rollouts), rollouts.group_ids, rollouts.num_groups, leave_one_out=True)
    spread = expand(outcome.to(process.dtype), lengths, total)
    advantages = process_weight * process + outcome_weight * spread
    return Estimate(whitened(advantages, keep=rollouts.keep) if whiten else advantages)


def process_rewards(log_probs: Tensor, reference_log_probs: Tensor, beta: float) -> Tensor:
    """r_t = beta * (log phi(y_t) - log ref(y_t)) (eq. 3), with the log-ratio cut at +-20.

    Args:
        log_probs: float [R], of the implicit reward model, with or without gradient.
        reference_log_probs: float [R].
        beta: scale.

    Returns:
        float [R].
    """
    return beta * log_ratio(log_probs, reference_log_probs)


def others_mean(values: Tensor, counted: Tensor, group_ids: Tensor, count: int) -> Tensor:
    """Mean over the other members of a sequence's group, [S]; 0 where there are none.

    Args:
        values: float [S].
        counted: bool [S], False for members that do not count.
        group_ids: int64 [S].
        count: number of groups.
    """
    own = values * counted
    sizes = segment_count(group_ids[counted], count)[group_ids] - counted.to(group_ids.dtype)
    return (segment_sum(own, group_ids, count)[group_ids] - own) / sizes.clamp_min(1).to(values.dtype) * (sizes > 0)


def prm_loss(
    log_probs: Tensor,
    reference_log_probs: Tensor,
    tokens: TokenBatch,
    counts: GlobalCounts,
    *,
    beta: float = 0.05,
    normalize: bool = False,
) -> LossOutput:
    """Cross-entropy of the outcome under the implicit reward model (arXiv:2502.01456, eq. 2): a micro-batch's share.

    -(z log sigma(x_i) + (1 - z) log(1 - sigma(x_i))), averaged over the sequences of the optimizer batch, with
    x_i = sum_t r_phi(y_it) and z = 1 for a response whose reward is over 0.5.

    Args:
        log_probs: float [R], of the reward model, with gradient.
        reference_log_probs: float [R].
        tokens: lengths and rewards; sequences without a trained token have no share.
        counts: sizes of the whole optimizer batch.
        beta: scale of the log-ratio; the paper's 0.05.
        normalize: mean instead of sum over a response's tokens: long responses do not saturate the sigmoid.

    Returns:
        The loss (0-d), and metrics of every sequence at each of its tokens: `prm/loss`, `prm/accuracy`.
    """
    rewards = process_rewards(log_probs, reference_log_probs, beta)
    lengths = tokens.sequence_lengths
    logits = sequence_mean(rewards, lengths) if normalize else sequence_sum(rewards, lengths)
    solved = tokens.sequence_rewards > 0.5
    # log(1 - sigma(x)) = -softplus(x), log sigma(x) = -softplus(-x)
    losses = softplus(logits * (1.0 - 2.0 * solved.to(logits.dtype))) * (lengths > 0)
    seen = logits.detach()
    right = ((seen > 0) == solved).to(seen.dtype)
    weights = lengths.to(seen.dtype)
    metrics = Metrics(
        sums={
            "prm/loss": (losses.detach() * weights).sum(),
            "prm/accuracy": (right * weights).sum(),
            "prm/reward": rewards.detach().sum(),
        }
    )
    return LossOutput(losses.sum() / max(counts.sequences, 1), metrics)
