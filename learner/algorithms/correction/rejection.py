"""Rejection of tokens that are not trained: rules on the drift, veto, age, second moment.

Every rule reads the whole batch as it came, not the tokens that other rules keep, so their order does not matter. A
token is trained where all rules keep it; a rejected one leaves numerators and denominators alike.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from rollmesh.learner.algorithms.correction.ratios import drift
from rollmesh.learner.algorithms.correction.settings import CorrectionSettings, Divergence, Rule
from rollmesh.learner.algorithms.ragged import segment_max, segment_mean, segment_min, segment_sum


def divergence(proximal: Tensor, behaviour: Tensor, kind: Divergence) -> Tensor:
    """Estimate of KL(behaviour || proximal) at every token, [R]; with d = log(proximal / behaviour).

    k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d (Schulman, Approximating KL Divergence, 2020).
    """
    d = drift(proximal, behaviour)
    if kind == "k1":
        return -d
    return d.square() / 2.0 if kind == "k2" else torch.expm1(d) - d


def statistic(values: Tensor, rule: Rule, sequence_ids: Tensor, num_sequences: int) -> Tensor:
    """The statistic that a rule bounds: divergences of tokens [R], or of sequences combined [S] (0 for empty ones)."""
    if rule.scope == "token":
        return values
    if rule.scope == "seq_max":
        largest = segment_max(values, sequence_ids, num_sequences)
        return torch.where(torch.isneginf(largest), 0.0, largest)
    combine = segment_sum if rule.scope == "seq_sum" else segment_mean
    return combine(values, sequence_ids, num_sequences)


def rejections(
    proximal: Tensor,
    behaviour: Tensor,
    staleness: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
    settings: CorrectionSettings,
) -> dict[str, Tensor]:
    """Tokens that each rule in use keeps.

    Args:
        proximal, behaviour: log-probs [R].
        staleness: integer [R].
        sequence_ids: int64 [R].
        num_sequences: S.
        settings: reject, veto, max_age, second_moment.

    Returns:
        Reason (a name of `reject`, `veto`, `second_moment`, `max_age`) -> bool [R], True for tokens that it keeps.
    """
    kept: dict[str, Tensor] = {}
    for rule in settings.rules:
        values = divergence(proximal, behaviour, rule.divergence)
        found = statistic(values, rule, sequence_ids, num_sequences)
        inside = (found >= rule.low) & (found <= rule.high)
        kept[rule.name] = inside if rule.scope == "token" else inside[sequence_ids]
    if settings.veto is not None:
        lowest = segment_min(drift(proximal, behaviour), sequence_ids, num_sequences)
        kept["veto"] = (lowest >= math.log(settings.veto))[sequence_ids]
    if settings.second_moment is not None:
        kept["second_moment"] = within_second_moment(drift(proximal, behaviour).square(), settings.second_moment)
    return kept | age_rejections(staleness, settings)


def age_rejections(staleness: Tensor, settings: CorrectionSettings) -> dict[str, Tensor]:
    """Tokens that `max_age` keeps: the one rule that needs no log-probs."""
    return {} if settings.max_age is None else {"max_age": staleness <= settings.max_age}


def within_second_moment(squares: Tensor, bound: float) -> Tensor:
    """The most tokens, by ascending square, with a mean square below the bound (M2PO, arXiv:2510.01161).

    Args:
        squares: [R], squared log-ratios.
        bound: of their mean.

    Returns:
        bool [R]; at least the token with the smallest square is True.
    """
    if not squares.numel():
        return squares.bool()
    ascending, order = torch.sort(squares, stable=True)
    ranks = torch.arange(1, squares.numel() + 1, device=squares.device)
    # Means over growing prefixes never fall, so those below the bound are a prefix themselves.
    below = (ascending.double().cumsum(0) / ranks) < bound
    kept = torch.empty_like(below)
    kept[order] = ranks <= below.sum().clamp_min(1)
    return kept


def all_keep(kept: dict[str, Tensor]) -> Tensor | None:
    """Tokens that every rule keeps, bool [R]; None without rules."""
    return functools.reduce(torch.logical_and, kept.values()) if kept else None
