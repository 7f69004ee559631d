"""The gathering of packed tokens for attention: pure index arithmetic.

Attention needs, for every segment, its queries and the keys of its whole context (the segment it continues, then
itself). Many short segments would be many small kernel calls. So segments of similar shape form one padded call: rows
of indices into the N packed tokens. Padding indices repeat place 0. A padded key is masked, a padded query is dropped,
so neither reaches a result or a gradient. Where segments are long a call holds one segment and pads nothing.

Invariant: no call's masks, those of its segments together, are larger than that of the longest sequence that may be
masked. A segment that needs a larger one has a call of its own, and is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollmesh.learner.batching.transfer import to_device
from rollmesh.learner.batching.types import Segments
from rollmesh.mesh.errors import DataError

LONGEST_MASKED = 16384
"""Tokens of the longest sequence that may be masked densely: 1 GiB of 4-byte numbers."""

# Padded query-key pairs that cost about as much as one more kernel call (measured on CPU with small heads).
_WASTE_PER_CALL = 2048


@dataclass(frozen=True, slots=True)
class Scoring:
    """A layer's rules to turn queries and keys into weights.

    Attributes:
        heads, kv_heads: heads of queries, and of keys and values.
        scale: factor of the scores.
        window: a query sees only the last `window` keys up to itself; none: all of them.
        softcap: scores become softcap * tanh(scores / softcap); none: as they are.
    """

    heads: int
    kv_heads: int
    scale: float
    window: int | None
    softcap: float | None


@dataclass(slots=True)
class AttentionCall:
    """An attention call over B segments, padded to Q queries and K keys.

    Attributes:
        queries: int64 [B * Q], places of the queries.
        keys: int64 [B * K], places of the keys.
        shape: (B, Q, K).
        prefix_lengths: int64 [B], keys before the first query.
        key_lengths: int64 [B], keys that are real.
        causal: True where row i of a segment sees keys 0 .. i and nothing else needs a mask.
    """

    queries: Tensor
    keys: Tensor
    shape: tuple[int, int, int]
    prefix_lengths: Tensor
    key_lengths: Tensor
    causal: bool
    _masks: dict[tuple[int | None, torch.dtype], Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Additive mask [B, 1, Q, K] of 0 and -inf; None where causal masking alone is right.

        Args:
            window: a query sees only the last `window` keys up to itself; none: all of them.
            dtype: of the mask.

        Raises:
            DataError: it would be larger than that of the longest sequence which may be masked.
        """
        _, rows, columns = self.shape
        reach = None if window is None or window >= columns else window
        # One for all layers of a kind.
        if (reach, dtype) not in self._masks:
            mask = None if self.causal and reach is None else self._build(rows, columns, reach, dtype)
            self._masks[reach, dtype] = mask
        return self._masks[reach, dtype]

    def _build(self, rows: int, columns: int, reach: int | None, dtype: torch.dtype) -> Tensor:
        refuse_mask(rows * columns)
        device = self.queries.device
        key = torch.arange(columns, device=device)
        query = self.prefix_lengths[:, None] + torch.arange(rows, device=device)
        last = torch.minimum(query, self.key_lengths[:, None] - 1)[..., None]
        seen = key <= last
        if reach is not None:
            seen &= key > last - reach
        return torch.zeros(seen.shape, device=device, dtype=dtype).masked_fill_(~seen, -torch.inf)[:, None]


@dataclass(frozen=True, slots=True)
class ExactLayout:
    """The calls of a packed micro-batch.

    Attributes:
        calls: cover every packed token exactly once as a query.
        restore: int64 [N], where each packed token stands in the calls' padded queries, call after call;
            None where the order is the packed one already.
    """

    calls: tuple[AttentionCall, ...]
    restore: Tensor | None


def largest_mask(segments: Segments, *, causal: bool) -> int:
    """Numbers of the largest mask that a segment needs.

    Args:
        segments: of a packed micro-batch.
        causal: segments that continue none need no mask.
    """
    numbers = segments.lengths * (segments.lengths + segments.prefix_lengths)
    return int(numbers[segments.prefix_lengths > 0].max(initial=0) if causal else numbers.max())


def refuse_mask(numbers: int) -> None:
    """Refuses a mask that would be larger than that of the longest sequence that may be masked.

    Args:
        numbers: of the mask: queries times keys.

    Raises:
        DataError: it is too large.
    """
    if numbers > LONGEST_MASKED**2:
        raise DataError(
            f"a sequence needs a mask of queries x keys of {numbers * 4 / 2**30:.1f} GiB, and there is no kernel that "
            "needs none",
            hint=f"keep sequences within {LONGEST_MASKED} tokens",
        )


def build_layout(segments: Segments, device: torch.device, waste: int = _WASTE_PER_CALL) -> ExactLayout:
    """Forms the calls.

    Args:
        segments: of the packed micro-batch.
        device: where the indices go.
        waste: padded query-key pairs allowed per call.
    """
    lengths, contexts = segments.lengths, segments.lengths + segments.prefix_lengths
    total = int(lengths.sum())
    restore = np.zeros(total, dtype=np.int64)
    calls = []
    base = 0
    for members in _buckets(lengths, contexts, waste):
        call, slots = _call(segments, members, device)
        for_queries = _ragged(segments.starts[members], lengths[members])
        restore[for_queries] = base + slots
        base += call.queries.numel()
        calls.append(call)
    identity = base == total and bool((restore == np.arange(total)).all())
    return ExactLayout(tuple(calls), None if identity else to_device(restore, device))


def _buckets(lengths: NDArray[np.int64], contexts: NDArray[np.int64], waste: int) -> list[NDArray[np.int64]]:
    """Segments of similar shape together; largest context first."""
    order = np.lexsort((-lengths, -contexts))
    buckets: list[list[int]] = []
    rows = columns = area = 0
    for index, length, context in zip(order.tolist(), lengths[order].tolist(), contexts[order].tolist(), strict=True):
        members = buckets[-1] if buckets else []
        grown = max(rows, length)
        padded = (len(members) + 1) * grown * columns
        if members and padded - (area + length * context) <= waste and padded <= LONGEST_MASKED**2:
            members.append(index)
            rows, area = grown, area + length * context
        else:
            buckets.append([index])
            rows, columns, area = length, context, length * context
    return [np.sort(np.array(members, dtype=np.int64)) for members in buckets]


def _call(
    segments: Segments, members: NDArray[np.int64], device: torch.device
) -> tuple[AttentionCall, NDArray[np.int64]]:
    """A call, and the places of its real queries among its padded ones."""
    starts, lengths = segments.starts[members], segments.lengths[members]
    prefix_starts, prefixes = segments.prefix_starts[members], segments.prefix_lengths[members]
    contexts = lengths + prefixes
    count, rows, columns = len(members), int(lengths.max()), int(contexts.max())
    row, column = np.arange(rows), np.arange(columns)
    real_query = row < lengths[:, None]
    queries = np.where(real_query, starts[:, None] + row, 0)
    from_prefix = column < prefixes[:, None]
    own = np.where(column < contexts[:, None], starts[:, None] + column - prefixes[:, None], 0)
    keys = np.where(from_prefix, prefix_starts[:, None] + column, own)
    call = AttentionCall(
        queries=to_device(queries.ravel(), device),
        keys=to_device(keys.ravel(), device),
        shape=(count, rows, columns),
        prefix_lengths=to_device(prefixes, device),
        key_lengths=to_device(contexts, device),
        causal=not prefixes.any(),
    )
    return call, np.flatnonzero(real_query.ravel())


def _ragged(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """The ranges starts[i] .. starts[i] + lengths[i], concatenated."""
    ends = lengths.cumsum()
    return np.arange(int(ends[-1])) - np.repeat(ends - lengths - starts, lengths)
