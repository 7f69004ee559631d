"""PRIME: process rewards from an implicit reward model (arXiv:2502.01456).

A language model phi is trained as a classifier of outcomes, through its log-ratio to a reference. So it also learns a
reward of every token (arXiv:2412.01981): r_phi(y_t) = beta * log(phi(y_t) / ref(y_t)). The estimator that uses these
rewards is `learner.algorithms.advantages.process`.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import softplus

from rollmesh.learner.algorithms.metrics import Metrics
from rollmesh.learner.algorithms.numerics import log_ratio
from rollmesh.learner.algorithms.ragged import segment_count, segment_sum, sequence_mean, sequence_sum
from rollmesh.learner.algorithms.types import GlobalCounts, LossOutput, TokenBatch


def process_rewards(log_probs: Tensor, reference_log_probs: Tensor, beta: float) -> Tensor:
    """r_t = beta * (log phi(y_t) - log ref(y_t)) (arXiv:2502.01456), with the log-ratio cut at +-20.

    Args:
        log_probs: float [R], of the implicit reward model, with or without gradient.
        reference_log_probs: float [R].
        beta: scale.

    Returns:
        float [R].
    """
    return beta * log_ratio(log_probs, reference_log_probs)


def others_mean(values: Tensor, counted: Tensor, group_ids: Tensor, count: int) -> Tensor:
    """Mean over the other members of a sequence's group, [S]; 0 without others.

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
    """Cross-entropy of the outcome under the implicit reward model (arXiv:2502.01456): a micro-batch's share.

    `-(z log sigma(x_i) + (1 - z) log(1 - sigma(x_i)))`, averaged over the sequences of the optimizer batch, with
    `x_i = sum_t r_phi(y_it)` and z = 1 for a response with a reward over 0.5.

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
