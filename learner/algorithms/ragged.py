"""Arithmetic on sequences that stand side by side: sums per segment, and recurrences in time.

Vectorized over sequences and groups by scatter; nothing loops over rows. A segment may be empty: its sum is 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Tokens that a scan solves one after the other; all blocks of that many are solved side by side.
_BLOCK = 64


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
    # Without `torch.bincount`: the host waits for the device to learn the size of its result.
    return segments.new_zeros(count, dtype=torch.int64).index_add_(0, segments, torch.ones_like(segments))


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


def expand(values: Tensor, lengths: Tensor, total: int | None = None) -> Tensor:
    """One value per sequence [S] at each of its tokens, [R]; with gradient where they have one.

    Args:
        values: [S].
        lengths: int64 [S].
        total: R, where it is known: saves a device its synchronization.
    """
    return torch.repeat_interleave(values, lengths, output_size=total)


def sequence_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """Sums of [R] over the tokens of each sequence, [S]; 0 for an empty one. With gradient where they have one."""
    if not values.numel() or not lengths.numel():
        return values.new_zeros(lengths.numel()) + 0.0 * values.sum()
    return torch.segment_reduce(values, "sum", lengths=lengths, initial=0.0)


def sequence_mean(values: Tensor, lengths: Tensor) -> Tensor:
    """Means of [R] over the tokens of each sequence, [S]; 0 for an empty one. With gradient where they have one."""
    return sequence_sum(values, lengths) / lengths.clamp_min(1).to(values.dtype)


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
    """Solves x_t = inputs_t + decays_t * x_{t+1} backwards in time, with x after the last token given by `last`.

    All sequences are one long recurrence with a decay of 0 after each of them. It is cut into blocks of equal size,
    whatever the lengths. All blocks are solved at once for an unknown x after them. The same recurrence over blocks
    gives these unknowns, and a second pass fills them in. Nothing is padded to the longest sequence, and a token's
    arithmetic is that of the plain loop.

    Args:
        inputs: float [R].
        decays: float [R], or one number.
        lengths: int64 [S], 0 is allowed.
        last: float [S]; none: 0.

    Returns:
        float [R], without gradient; results out of the dtype's range are the largest finite numbers.
    """
    with torch.no_grad():
        places, sequences = last_tokens(lengths)
        factors = decays.clone() if isinstance(decays, Tensor) else torch.full_like(inputs, decays)
        if last is not None:
            inputs = inputs.clone()
            inputs[places] += factors[places] * last[sequences]
        factors[places] = 0.0
        return _solve(inputs, factors)


def discounted_returns(rewards: Tensor, discount: Tensor | float, lengths: Tensor) -> Tensor:
    """Reward to go: R_t = rewards_t + discount * R_{t+1}, [R]."""
    return reverse_scan(rewards, discount, lengths)


def running_sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Sums over a sequence's tokens up to and with each token, [R], without gradient."""
    return reverse_scan(values.flip(0), 1.0, lengths.flip(0)).flip(0)


def _solve(inputs: Tensor, decays: Tensor) -> Tensor:
    """x_t = inputs_t + decays_t * x_{t+1} over one sequence [N], with 0 after it."""
    size = inputs.numel()
    steps = min(_BLOCK, math.isqrt(max(size - 1, 0)) + 1)
    blocks = -(-size // steps)
    summands, factors = _by_step(inputs, steps, blocks), _by_step(decays, steps, blocks)
    bound = torch.finfo(inputs.dtype).max
    following = inputs.new_zeros(blocks)
    if blocks > 1:
        heads = following.clone()
        for summand, factor in zip(reversed(summands.unbind()), reversed(factors.unbind()), strict=True):
            torch.addcmul(summand, factor, heads, out=heads).clamp_(-bound, bound)
        # Where a factor is 0 the product is, even if others overflow: that is the NaN of inf * 0.
        products = factors.prod(0).nan_to_num_(nan=0.0)
        following[:-1] = _solve(heads, products)[1:]
    for summand, factor in zip(reversed(summands.unbind()), reversed(factors.unbind()), strict=True):
        following = summand.addcmul_(factor, following).clamp_(-bound, bound)
    return summands.t().reshape(-1)[:size]


def _by_step(values: Tensor, steps: int, blocks: int) -> Tensor:
    """Cuts [N] into blocks side by side, [steps, blocks]; zeros fill the last one up."""
    padded = torch.nn.functional.pad(values, (0, steps * blocks - values.numel()))
    return padded.view(blocks, steps).t().contiguous()
