"""Ratios of two policies at the sampled tokens, at the level of tokens or of sequences, and the weights made of them.

Invariants: nothing here has a gradient; every ratio is finite and positive, whatever the log-probs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollmesh.learner.algorithms.correction.settings import CorrectionSettings, Level, Proximal
from rollmesh.learner.algorithms.numerics import MAX_LOG_RATIO, MIN_LOG_PROB, finite_log_probs, log_ratio
from rollmesh.learner.algorithms.ragged import segment_count, segment_mean, segment_sum

# Keeps log of a sum of two probabilities finite where both are 0.
_TINY = 1e-10


def drift(proximal: Tensor, behaviour: Tensor, bound: float = MAX_LOG_RATIO) -> Tensor:
    """d = log(proximal / behaviour) per token, within +-bound.

    A token that was sampled cannot have probability 0 under the policy that sampled it. A behaviour log-prob that is
    not finite was not recorded, and nothing is known of the drift there. It is taken as 0.

    Args:
        proximal, behaviour: [R].
        bound: largest absolute value.

    Returns:
        [R], without gradient.
    """
    known = torch.isfinite(behaviour)
    return torch.where(known, log_ratio(proximal.detach(), behaviour.detach(), bound), 0.0)


def sequence_drift(
    proximal: Tensor, behaviour: Tensor, sequence_ids: Tensor, num_sequences: int, *, mean: bool
) -> Tensor:
    """Sum or mean of the tokens' log-ratios per sequence, [S]; finite, 0 for an empty one."""
    # To be bounded only after summing: the others may compensate for one token far off.
    tokens = drift(proximal, behaviour, -MIN_LOG_PROB)
    combine = segment_mean if mean else segment_sum
    return combine(tokens, sequence_ids, num_sequences)


def level_drift(proximal: Tensor, behaviour: Tensor, sequence_ids: Tensor, num_sequences: int, level: Level) -> Tensor:
    """Log of the ratio that weighs each token, [R], within +-MAX_LOG_RATIO.

    It is the token's own, or its sequence's product or geometric mean.
    """
    if level == "token":
        return drift(proximal, behaviour)
    whole = sequence_drift(proximal, behaviour, sequence_ids, num_sequences, mean=level == "geometric")
    return whole.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[sequence_ids]


def importance_weights(
    proximal: Tensor, behaviour: Tensor, sequence_ids: Tensor, num_sequences: int, settings: CorrectionSettings
) -> Tensor:
    """Weights of the tokens' losses.

    With the ratio r of `settings.level`: `masked_is` gives r where floor <= r <= cap, else 0; other modes
    min(max(r, floor), cap). `settings.normalize` divides by the batch's mean weight, afterwards.

    Args:
        proximal, behaviour: log-probs [R].
        sequence_ids: int64 [R].
        num_sequences: S.
        settings: mode, level, cap, floor, normalize.

    Returns:
        [R], without gradient, in the dtype of the log-probs.
    """
    ratio = level_drift(proximal, behaviour, sequence_ids, num_sequences, settings.level).exp()
    weights = truncate(ratio, settings)
    return (
        weights / mean_weight(weights, sequence_ids, num_sequences, settings.level) if settings.normalize else weights
    )


def truncate(ratio: Tensor, settings: CorrectionSettings) -> Tensor:
    """Ratios [R] brought into [floor, cap]: by mask, or by clamping."""
    if settings.mode == "masked_is":
        return torch.where((ratio >= settings.floor) & (ratio <= settings.cap), ratio, 0.0)
    return ratio.clamp(settings.floor, settings.cap)


def mean_weight(weights: Tensor, sequence_ids: Tensor, num_sequences: int, level: Level) -> Tensor:
    """Mean over the tokens, or, where a sequence has one weight, over the sequences that have tokens; 0-d, never 0."""
    if level == "token":
        mean = weights.sum() / max(weights.numel(), 1)
    else:
        sizes = segment_count(sequence_ids, num_sequences)
        means = segment_mean(weights, sequence_ids, num_sequences)
        mean = means.sum() / (sizes > 0).sum().clamp_min(1)
    return torch.where(mean > 0, mean, 1.0)


def interpolated_proximal(current: Tensor, behaviour: Tensor, age: Tensor, kind: Proximal) -> Tensor:
    """The proximal policy's log-probs, guessed from its neighbours instead of computed.

    The proximal policy is the last one before the current. A token's behaviour policy lies `age` versions before the
    current one. So the proximal one stands at alpha = (age - 1) / age of the way from behaviour to current:

    - `loglinear`: (1 - alpha) log pi_behaviour + alpha log pi_current;
    - `linear`: log((1 - alpha) pi_behaviour + alpha pi_current + 1e-10);
    - `behaviour`: log pi_behaviour.

    Args:
        current, behaviour: log-probs [R].
        age: integer [R], versions from behaviour to current; up to 1: the behaviour policy is the proximal one.
        kind: one of the above; `recompute` is not an interpolation.

    Returns:
        [R], without gradient.

    Raises:
        ValueError: another kind.
    """
    behaviour, current = finite_log_probs(behaviour.detach()), finite_log_probs(current.detach())
    if kind == "behaviour":
        return behaviour
    age = age.to(behaviour.dtype)
    alpha = torch.where(age > 0, (age - 1.0) / age.clamp_min(1.0), 0.0).clamp(0.0, 1.0)
    if kind == "loglinear":
        return torch.lerp(behaviour, current, alpha)
    if kind == "linear":
        return torch.log((1.0 - alpha) * behaviour.exp() + alpha * current.exp() + _TINY)
    raise ValueError(f"{kind!r} is not an interpolation")
