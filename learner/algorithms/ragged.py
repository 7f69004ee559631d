"""Arithmetic on sequences that stand side by side: sums per segment, and recurrences in time.

Vectorized over sequences and groups by scatter; nothing loops over rows. A segment may be empty: its sum is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor


def segment_sum(values: Tensor, segments: Tensor, count: int) -> Tensor:
    """Sums per segment.

    Args:
        values: [N], or [N, K].
        segments: int64 [N], 0 .. count-1, in any order.
        count: number of segments.

    Returns:
        [count] or [count, K], in the dtype of the values; with gradient where they have one.
    """
    return values.new_zeros((count, *values.shape[1:])).index_add(0, segments, values)


def segment_count(segments: Tensor, count: int) -> Tensor:
    """Elements per segment, int64 [count]."""
    return torch.bincount(segments, minlength=count)


def segment_mean(values: Tensor, segments: Tensor, count: int) -> Tensor:
    """Means per segment [count]; 0 for an empty one."""
    sizes = segment_count(segments, count).clamp_min(1).to(values.dtype)
    return segment_sum(values, segments, count) / (sizes if values.dim() == 1 else sizes[:, None])


def segment_max(values: Tensor, segments: Tensor, count: int) -> Tensor:
    """Maxima per segment [count]; -inf for an empty one. No gradient."""
    start = values.new_full((count,), -torch.inf)
    return start.scatter_reduce(0, segments, values.detach(), "amax", include_self=True)


def segment_min(values: Tensor, segments: Tensor, count: int) -> Tensor:
    """Minima per segment [count]; +inf for an empty one. No gradient."""
    return -segment_max(-values, segments, count)


def segment_std(values: Tensor, segments: Tensor, count: int, *, correction: int = 1) -> Tensor:
    """Standard deviations per segment [count], in two passes; 0 where a segment has `correction` elements or fewer."""
    sizes = segment_count(segments, count)
    centred = values - segment_mean(values, segments, count)[segments]
    squares = segment_sum(centred.square(), segments, count)
    freedom = (sizes - correction).clamp_min(1).to(values.dtype)
    return torch.where(sizes > correction, (squares / freedom).sqrt(), 0.0)


def last_tokens(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Places of the last token of every sequence that has one.

    Args:
        lengths: int64 [S].

    Returns:
        places int64 [K] in [R], and the sequences int64 [K] that they belong to.
    """
    sequences = torch.nonzero(lengths > 0).squeeze(1)
    return lengths.cumsum(0)[sequences] - 1, sequences


def positions(lengths: Tensor) -> Tensor:
    """Position of every token in its sequence, int64 [R]."""
    starts = lengths.cumsum(0) - lengths
    total = int(lengths.sum())
    return torch.arange(total, device=lengths.device) - torch.repeat_interleave(starts, lengths, output_size=total)


def shift_left(values: Tensor, lengths: Tensor, fill: Tensor | float = 0.0) -> Tensor:
    """The next token's value at every token; `fill` (a number, or one value per sequence [S]) at the last one."""
    shifted = torch.empty_like(values)
    shifted[:-1] = values[1:]
    places, sequences = last_tokens(lengths)
    shifted[places] = fill[sequences] if isinstance(fill, Tensor) else fill
    return shifted


def reverse_scan(inputs: Tensor, decays: Tensor | float, lengths: Tensor, last: Tensor | None = None) -> Tensor:
    """Solves x_t = inputs_t + decays_t * x_{t+1} backwards in time, with x behind the last token given by `last`.

    One step per time index over all sequences at once: sequences are ordered by length, so that at every time index
    those which are still running are a prefix, and nothing is padded.

    Args:
        inputs: [R].
        decays: [R], or one number.
        lengths: int64 [S].
        last: [S]; none: 0.

    Returns:
        [R], without gradient.
    """
    with torch.no_grad():
        if not inputs.numel():
            return inputs.clone()
        place, widths = _time_major(lengths)
        ordered = inputs[place]
        factors = decays[place] if isinstance(decays, Tensor) else None
        carry = (
            inputs.new_zeros(int(widths[0])) if last is None else last[_by_length(lengths)][: int(widths[0])].clone()
        )
        result = torch.empty_like(ordered)
        end = ordered.numel()
        for width in reversed(widths.tolist()):
            begin = end - width
            factor = factors[begin:end] if factors is not None else decays
            step = ordered[begin:end] + factor * carry[:width]
            result[begin:end] = step
            carry[:width] = step
            end = begin
        scattered = torch.empty_like(result)
        scattered[place] = result
        return scattered


def discounted_returns(rewards: Tensor, discount: Tensor | float, lengths: Tensor) -> Tensor:
    """Reward to go: R_t = rewards_t + discount * R_{t+1}, [R]."""
    return reverse_scan(rewards, discount, lengths)


def _by_length(lengths: Tensor) -> Tensor:
    """Sequences, longest first, int64 [S]."""
    return torch.argsort(lengths, descending=True, stable=True)


def _time_major(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Places of all tokens in the order (time, rank by length), int64 [R], and sequences running per time, [T]."""
    order = _by_length(lengths)
    starts = lengths.cumsum(0) - lengths
    longest = int(lengths.max())
    # Sequences of at least t + 1 tokens run at time t.
    ended = torch.bincount(lengths, minlength=longest + 1)
    widths = lengths.numel() - ended.cumsum(0)[:longest]
    time = torch.repeat_interleave(torch.arange(longest, device=lengths.device), widths)
    begins = widths.cumsum(0) - widths
    rank = torch.arange(time.numel(), device=lengths.device) - begins[time]
    return starts[order[rank]] + time, widths
