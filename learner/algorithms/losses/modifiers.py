"""Modifiers of any policy loss: the sequences and tokens to which it is applied."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rollmesh.learner.algorithms.losses.checks import check_range
from rollmesh.learner.algorithms.numerics import finite_log_probs, log_ratio
from rollmesh.learner.algorithms.ragged import segment_mean
from rollmesh.learner.algorithms.types import StepView, TokenBatch


def off_policy_sequence_keep(log_probs: Tensor, tokens: TokenBatch, threshold: float) -> Tensor:
    """Tokens that stay when bad sequences are left out from which the policy has moved away.

    Dropped are tokens with A < 0 of sequences with mean_t(log behaviour - log pi) > threshold. The policy need not
    unlearn behaviour that it has dropped, and the gradient there is large. DeepSeek-V3.2, arXiv:2512.02556, sec. 3.1
    (TRL's off-policy mask, slime's OPSM).

    Args:
        log_probs: float [R], of the policy being trained; without gradient, or it is not followed.
        tokens: advantages and behaviour log-probs [R], whole sequences.
        threshold: largest mean drift, nats per token.

    Returns:
        bool [R].
    """
    behaviour = finite_log_probs(tokens.behaviour_log_probs)
    # Wide bounds: one impossible token decides on its sequence.
    drift = log_ratio(behaviour, finite_log_probs(log_probs.detach()), math.inf)
    means = segment_mean(drift, tokens.sequence_ids, tokens.num_sequences)[tokens.sequence_ids]
    return ~((tokens.advantages < 0) & (means > threshold))


def top_entropy_selection(view: StepView, *, quantile: float = 0.2) -> Tensor:
    """Tokens of highest entropy: the forks of a chain of thought, which carry the learning.

    Kept are tokens with H >= the (1 - quantile)-quantile of the minibatch's entropies (linear interpolation). "Beyond
    the 80/20 Rule", arXiv:2506.01939, eq. 5. The others have loss 0 and stay in the denominators.

    Args:
        view: the whole minibatch.
        quantile: share that is kept; the paper's 0.2.

    Returns:
        bool [R].

    Raises:
        SettingsError: a share outside (0, 1].
    """
    check_range("quantile", quantile, 0.0, 1.0, open_low=True)
    entropy = view.entropy
    if not entropy.numel():
        return torch.zeros_like(entropy, dtype=torch.bool)
    # torch.quantile refuses more than 2^24 values.
    rank = float(entropy.new_tensor(1.0 - quantile) * (entropy.numel() - 1))
    below = math.floor(rank)
    lower = entropy.kthvalue(below + 1).values
    upper = entropy.kthvalue(min(below + 2, entropy.numel())).values
    return entropy >= torch.lerp(lower, upper, rank - below)
