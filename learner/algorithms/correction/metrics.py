"""Metrics of a whole batch: distance of behaviour and proximal policy, and the effects of weights and rules.

Names and definitions are verl's (`rollout_corr/...`), so that curves can be laid over one another; they stand here
without that prefix. As there, metrics over sequences count every sequence of the batch, one without tokens as a ratio
of 1 (its weight as 0). Those of rejection rules count only sequences with tokens. Computed in float64, once per batch;
every metric is finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from rollmesh.learner.algorithms.correction.ratios import drift, level_drift, mean_weight, sequence_drift, truncate
from rollmesh.learner.algorithms.correction.rejection import divergence, statistic
from rollmesh.learner.algorithms.correction.settings import CorrectionSettings, Rule
from rollmesh.learner.algorithms.numerics import MAX_LOG_RATIO, MIN_LOG_PROB, finite_log_probs
from rollmesh.learner.algorithms.ragged import segment_count, segment_mean

# exp(200) and any sum of such are finite in float64.
_MAX_EXPONENT = 200.0


def diagnostics(train: Tensor, rollout: Tensor, sequence_ids: Tensor, num_sequences: int) -> dict[str, float]:
    """Distance of two policies at the sampled tokens.

    With `d = log(train / rollout)` per token, m_i the mean log-prob of sequence i and D_i its sum of d:

    - `kl = mean(-d)`, `k3_kl = mean(e^d - 1 - d)`;
    - `*_log_ppl = mean(-m_i)`, `*_ppl = mean(e^-m_i)`;
    - `log_ppl_diff` of rollout minus train means (mean, absolute mean, extremes), `ppl_ratio` the mean of its
      exponential;
    - `chi2_token = mean(e^2d) - 1` and `chi2_seq = mean(e^2D_i) - 1`, the chi-square divergences that govern the
      variance of importance weights.

    Args:
        train, rollout: log-probs [R] of proximal (or current) and behaviour policy.
        sequence_ids: int64 [R].
        num_sequences: S.

    Returns:
        Metrics by name; none for a batch without tokens.
    """
    if not train.numel():
        return {}
    train, rollout = finite_log_probs(train.detach().double()), finite_log_probs(rollout.detach().double())
    d = drift(train, rollout, -MIN_LOG_PROB)
    own, other = (-segment_mean(x, sequence_ids, num_sequences) for x in (train, rollout))
    gap = own - other
    whole = sequence_drift(train, rollout, sequence_ids, num_sequences, mean=False)
    return _numbers(
        {
            "kl": -d.mean(),
            "k3_kl": (_exp(d) - 1.0 - d).mean(),
            "training_ppl": _exp(own).mean(),
            "training_log_ppl": own.mean(),
            "rollout_ppl": _exp(other).mean(),
            "rollout_log_ppl": other.mean(),
            "log_ppl_diff": gap.mean(),
            "log_ppl_abs_diff": gap.abs().mean(),
            "log_ppl_diff_max": gap.max(),
            "log_ppl_diff_min": gap.min(),
            "ppl_ratio": _exp(gap).mean(),
            "chi2_token": torch.expm1(2.0 * drift(train, rollout)).mean(),
            "chi2_seq": torch.expm1(2.0 * whole.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).mean(),
        }
    )


def weight_metrics(
    proximal: Tensor, behaviour: Tensor, sequence_ids: Tensor, num_sequences: int, settings: CorrectionSettings
) -> dict[str, float]:
    """Statistics of the importance weights; names begin with `rollout_is_`.

    Over tokens: `mean` and `std` of the weights, `max` and `min`, `eff_sample_size` as a share. `ratio_fraction_high`
    and `low` are ratios before truncation over `cap`, and under `floor` (1 / cap without one). Over the sequences' mean
    weights: `seq_mean`, `seq_std` and so on. `oob_ratio`, in mode `masked_is`, is the share of tokens with weight 0.
    With `normalize` the metrics are of the weights before the division by `batch_norm_factor`.

    Args:
        proximal, behaviour: log-probs [R].
        sequence_ids: int64 [R].
        num_sequences: S.
        settings: mode, level, cap, floor, normalize.

    Returns:
        Metrics by name; none for a batch without tokens.
    """
    if not proximal.numel():
        return {}
    d = level_drift(proximal.double(), behaviour.double(), sequence_ids, num_sequences, settings.level)
    ratio = d.exp()
    weights = truncate(ratio, settings)
    low, high = settings.floor or 1.0 / settings.cap, settings.cap
    log_low, log_high = (math.log(bound) if bound > 0.0 else -math.inf for bound in (low, high))
    if settings.level == "token":
        extremes, logs = weights, d
    else:
        mean = settings.level == "geometric"
        logs = sequence_drift(proximal.double(), behaviour.double(), sequence_ids, num_sequences, mean=mean)
        extremes = logs.clamp_max(MAX_LOG_RATIO).exp()
    found = {
        "mean": weights.mean(),
        "max": extremes.max(),
        "min": extremes.min(),
        "std": _spread(weights),
        "eff_sample_size": _effective_share(weights),
        "ratio_fraction_high": _share(logs > log_high),
        "ratio_fraction_low": _share(logs < log_low),
    }
    per_sequence = segment_mean(weights, sequence_ids, num_sequences)
    raw = segment_mean(ratio, sequence_ids, num_sequences)
    found |= _over_sequences(per_sequence, 1.0)
    found |= {"seq_fraction_high": _share(raw > high), "seq_fraction_low": _share(raw < low)}
    if settings.mode == "masked_is":
        found["oob_ratio"] = _share((ratio > settings.cap) | (ratio < settings.floor))
    if settings.normalize:
        found["batch_norm_factor"] = mean_weight(weights, sequence_ids, num_sequences, settings.level)
    return {f"rollout_is_{name}": value for name, value in _numbers(found).items()}


def rule_metrics(
    proximal: Tensor, behaviour: Tensor, sequence_ids: Tensor, num_sequences: int, settings: CorrectionSettings
) -> dict[str, float]:
    """The statistics that the rejection rules bound; names begin with `rollout_rs_<rule>_`.

    `mean` and `std` (of the statistic within the bounds) are over tokens. `max`, `min` and shares outside the bounds
    are over tokens or, for rules over sequences, over sequences. Then the same follows over sequences' means.

    Args:
        proximal, behaviour: log-probs [R].
        sequence_ids: int64 [R].
        num_sequences: S.
        settings: reject.

    Returns:
        Metrics by name; none for a batch without tokens.
    """
    if not proximal.numel():
        return {}
    filled = segment_count(sequence_ids, num_sequences) > 0
    metrics: dict[str, float] = {}
    for rule in settings.rules:
        values = divergence(proximal.double(), behaviour.double(), rule.divergence)
        found = statistic(values, rule, sequence_ids, num_sequences)
        if rule.scope == "token":
            tokens, extremes, means = found, found, segment_mean(found, sequence_ids, num_sequences)[filled]
        else:
            tokens, extremes, means = found[sequence_ids], found[filled], found[filled]
        metrics |= {f"rollout_rs_{rule.name}_{key}": x for key, x in _of_rule(rule, tokens, extremes, means).items()}
    return metrics


def kept_metrics(kept: Mapping[str, Tensor], sequence_ids: Tensor, num_sequences: int) -> dict[str, float]:
    """Shares of rejected tokens, by reason and of all.

    Names: `rollout_rs_<reason>_masked_fraction` (tokens), `rollout_rs_<reason>_seq_masked_fraction` (sequences with
    tokens that lose any). The same without a reason are of tokens that any rule rejects, and of all sequences.

    Args:
        kept: reason -> bool [R], True for tokens that stay.
        sequence_ids: int64 [R].
        num_sequences: S.
    """
    if not kept or not sequence_ids.numel():
        return {}
    together = torch.stack([*kept.values(), torch.stack(list(kept.values())).all(0)])
    filled = segment_count(sequence_ids, num_sequences).count_nonzero().clamp_min(1)
    tokens = (~together).double().mean(1)
    touched = torch.stack([_touched(keep, sequence_ids, num_sequences) for keep in together])
    sequences = touched / torch.cat((filled.expand(len(kept)), filled.new_tensor([num_sequences])))
    metrics: dict[str, float] = {}
    shares = zip([f"{reason}_" for reason in kept] + [""], tokens.tolist(), sequences.tolist(), strict=True)
    for prefix, of_tokens, of_sequences in shares:
        metrics[f"rollout_rs_{prefix}masked_fraction"] = of_tokens
        metrics[f"rollout_rs_{prefix}seq_masked_fraction"] = of_sequences
    return metrics


def _of_rule(rule: Rule, tokens: Tensor, extremes: Tensor, means: Tensor) -> dict[str, float]:
    low = rule.low if rule.divergence == "k1" else 0.0
    found = {
        "mean": tokens.mean(),
        "max": extremes.max(),
        "min": extremes.min(),
        "fraction_high": _share(extremes > rule.high),
        "fraction_low": _share(extremes < low),
        "std": _spread(tokens.clamp(low, rule.high)),
        **_over_sequences(means, 0.0),
        "seq_fraction_high": _share(means > rule.high),
    }
    if rule.divergence == "k1":
        found["seq_fraction_low"] = _share(means < low)
    return _numbers(found)


def _over_sequences(means: Tensor, neutral: float) -> dict[str, Tensor]:
    """Spread of the sequences' means [S >= 1]; deviations are from `neutral`."""
    return {
        "seq_mean": means.mean(),
        "seq_std": means.std() if means.numel() > 1 else means.new_zeros(()),
        "seq_max": means.max(),
        "seq_min": means.min(),
        "seq_max_deviation": (means - neutral).abs().max(),
    }


def _spread(values: Tensor) -> Tensor:
    """Standard deviation over [R >= 1] values (of the population)."""
    return values.std(correction=0)


def _effective_share(weights: Tensor) -> Tensor:
    """Kish's effective sample size as a share of the tokens: (mean w)^2 / mean w^2; 0 where all weights are 0."""
    squares = weights.square().mean()
    return torch.where(squares > 0, weights.mean().square() / squares, 0.0)


def _share(flags: Tensor) -> Tensor:
    return flags.double().mean()


def _touched(keep: Tensor, sequence_ids: Tensor, num_sequences: int) -> Tensor:
    """Number of sequences that lose a token."""
    return segment_count(sequence_ids[~keep], num_sequences).count_nonzero()


def _exp(values: Tensor) -> Tensor:
    return values.clamp(-_MAX_EXPONENT, _MAX_EXPONENT).exp()


def _numbers(found: Mapping[str, Tensor]) -> dict[str, float]:
    """All to the host in one transfer."""
    return dict(zip(found, torch.stack(list(found.values())).tolist(), strict=True))
