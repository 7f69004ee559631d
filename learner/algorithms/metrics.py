"""Metrics that add up: sums, maxima and histograms that micro-batches and ranks combine exactly.

A micro-batch contributes sums over its tokens, never means: means of unequal parts do not add up. `summarize` sees all
parts and divides once. Everything is detached and stays on the device until `summarize`. The tokens seen are those that
were computed: where sequences without advantage are left out, metrics are over the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

# Log-ratio histograms: 256 bins on [-2, 2], so quantiles of the ratio are right to 1.6 %.
_BINS = 256
_RANGE = 2.0
_QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Metrics:
    """The metrics of one micro-batch.

    Attributes:
        sums: name -> 0-d sum over tokens; reported as the mean over the tokens seen.
        weights: name -> [2], sums of w and w^2 over tokens; reported as mean and effective sample size (share).
        log_ratios: name -> [256], counts per log-ratio bin; reported as quantiles of the ratio.
        maxima: name -> 0-d; reported as the maximum.
        averages: name -> [2], a sum and the number of its terms (sequences, pairs); reported as their quotient.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    log_ratios: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)
    averages: dict[str, Tensor] = field(default_factory=dict)

    def __or__(self, other: Metrics) -> Metrics:
        """Both sets of names (of the same micro-batch)."""
        return Metrics(
            self.sums | other.sums,
            self.weights | other.weights,
            self.log_ratios | other.log_ratios,
            self.maxima | other.maxima,
            self.averages | other.averages,
        )


def distribution(name: str, values: Tensor) -> dict[str, float]:
    """Mean, standard deviation, extremes and quartiles of values [N], named `name/mean` ...; none without values."""
    if not values.numel():
        return {}
    data = values.detach().double().flatten()
    quartiles = torch.quantile(data[:: max(1, data.numel() // (1 << 20))], data.new_tensor([0.25, 0.5, 0.75])).tolist()
    return {
        f"{name}/mean": float(data.mean()),
        f"{name}/std": float(data.std(correction=0)),
        f"{name}/min": float(data.min()),
        f"{name}/max": float(data.max()),
        **{f"{name}/p{q}": value for q, value in zip((25, 50, 75), quartiles, strict=True)},
    }


def weight_moments(weights: Tensor) -> Tensor:
    """Sums of w and w^2 over [R] weights, for `Metrics.weights`."""
    return torch.stack((weights.sum(), weights.square().sum()))


def average_of(values: Tensor) -> Tensor:
    """Sum and number of values [N], for `Metrics.averages`."""
    return torch.stack((values.sum(), values.new_tensor(float(values.numel()))))


def log_ratio_histogram(log_ratios: Tensor) -> Tensor:
    """Counts per bin of [R] log-ratios, those out of range in the outermost bins, for `Metrics.log_ratios`."""
    return torch.histc(log_ratios.clamp(-_RANGE, _RANGE).nan_to_num_(), bins=_BINS, min=-_RANGE, max=_RANGE)


def summarize(
    parts: Sequence[Metrics],
    tokens: int,
    *,
    reduce_sum: Callable[[Tensor], Tensor] | None = None,
    reduce_max: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, float]:
    """Combines micro-batches (and ranks) into metrics.

    Args:
        parts: contributions with the same names; every rank has at least one.
        tokens: tokens that this rank's parts have seen.
        reduce_sum, reduce_max: combine a vector over ranks; none: one rank.
    """
    first = parts[0]
    added = [
        torch.stack([getattr(part, kind)[name] for part in parts]).sum(0).double().reshape(-1)
        for kind in ("sums", "weights", "log_ratios", "averages")
        for name in getattr(first, kind)
    ]
    tops = [torch.stack([part.maxima[name] for part in parts]).amax(0).double().reshape(-1) for name in first.maxima]
    # A metric may have been made on the host.
    device = next((vector.device for vector in (*added, *tops) if vector.device.type != "cpu"), torch.device("cpu"))
    added.insert(0, torch.full((1,), tokens, dtype=torch.float64, device=device))
    vectors = [_reduced(added, device, reduce_sum), *([_reduced(tops, device, reduce_max)] if tops else [])]
    # One reading for all: the host waits for the device with each.
    seen, *values = torch.cat(vectors).tolist()
    tokens = max(int(seen), 1)
    metrics = {name: value / tokens for name, value in zip(first.sums, values, strict=False)}
    at = len(first.sums)
    for name in first.weights:
        total, squares = values[at : at + 2]
        metrics[f"{name}/mean"] = total / tokens
        metrics[f"{name}/ess"] = total * total / (squares * tokens) if squares > 0 else 0.0
        at += 2
    for name in first.log_ratios:
        metrics |= {f"{name}/{q}": value for q, value in _quantiles(values[at : at + _BINS]).items()}
        at += _BINS
    for name in first.averages:
        total, terms = values[at : at + 2]
        if terms:
            metrics[name] = total / terms
        at += 2
    return metrics | dict(zip(first.maxima, values[at:], strict=True))


def _reduced(vectors: Sequence[Tensor], device: torch.device, reduce: Callable[[Tensor], Tensor] | None) -> Tensor:
    joined = torch.cat([vector.to(device) for vector in vectors])
    return reduce(joined) if reduce else joined


def _quantiles(counts: Sequence[float]) -> dict[str, float]:
    cumulative = torch.tensor(counts, dtype=torch.float64).cumsum(0)
    total = float(cumulative[-1])
    targets = torch.tensor([share * total for share in _QUANTILES.values()], dtype=torch.float64)
    bins = torch.searchsorted(cumulative, targets).clamp_max(_BINS - 1)
    centres = (bins + 0.5) * (2 * _RANGE / _BINS) - _RANGE
    return dict(zip(_QUANTILES, torch.exp(centres).tolist(), strict=True))
