"""Attention over packed sequences with torch's FlexAttention, compiled on CUDA.

A token sees its own segment up to itself, and the segment that it continues, wherever that stands. The kernel skips
blocks of which no pair is seen. It takes float32 too. On a CPU it has no backward pass, and runs uncompiled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from rollmesh.learner.batching.transfer import to_device
from rollmesh.learner.batching.types import Segments
from rollmesh.learner.engines.fsdp2.attention_calls import Scoring


@dataclass(slots=True)
class FlexLayout:
    """The first visible position of each token of a packed row.

    Attributes:
        starts: int64 [N], first place of each token's segment.
        prefix_starts, prefix_ends: int64 [N], places of the segment it continues; equal where it continues none.
        positions: int64 [N], in its sequence.
    """

    starts: Tensor
    prefix_starts: Tensor
    prefix_ends: Tensor
    positions: Tensor
    _masks: dict[int | None, BlockMask] = field(default_factory=dict)

    def mask(self, window: int | None) -> BlockMask:
        """The pairs that are seen, one for all layers of a kind.

        Args:
            window: a query sees only the last `window` keys up to itself; none: all of them.
        """
        if window not in self._masks:
            tokens, device = len(self.starts), self.starts.device
            self._masks[window] = create_block_mask(
                self._seen(window), None, None, tokens, tokens, device=device, _compile=device.type == "cuda"
            )
        return self._masks[window]

    def _seen(self, window: int | None) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        def seen(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            own = (key >= self.starts[query]) & (key <= query)
            before = (key >= self.prefix_starts[query]) & (key < self.prefix_ends[query])
            if window is None:
                return own | before
            return (own | before) & (self.positions[query] - self.positions[key] < window)

        return seen


def build_flex_layout(segments: Segments, device: torch.device) -> FlexLayout:
    """Index arithmetic for `flex_packed`."""
    lengths, prefixes = segments.lengths, segments.prefix_lengths
    owner = np.repeat(np.arange(len(lengths)), lengths)
    starts = segments.starts[owner]
    prefix_starts = segments.prefix_starts[owner]
    return FlexLayout(
        starts=to_device(starts, device),
        prefix_starts=to_device(prefix_starts, device),
        prefix_ends=to_device(prefix_starts + prefixes[owner], device),
        positions=to_device(np.arange(len(owner)) - starts + prefixes[owner], device),
    )


def flex_packed(query: Tensor, key: Tensor, value: Tensor, layout: FlexLayout, scoring: Scoring) -> Tensor:
    """Causal attention within each sequence.

    Args:
        query: [N, H * D].
        key: [N, H_kv * D].
        value: [N, H_kv * E].
        layout: from `build_flex_layout`.
        scoring: heads, scale, window and soft cap.

    Returns:
        [N, H * E].
    """
    heads = (scoring.heads, scoring.kv_heads, scoring.kv_heads)
    q, k, v = (
        rows.view(len(rows), count, -1).transpose(0, 1)[None]
        for rows, count in zip((query, key, value), heads, strict=True)
    )
    attend = _compiled if query.is_cuda else _plain
    output = attend()(
        q,
        k,
        v,
        score_mod=_capped(scoring.softcap),
        block_mask=layout.mask(scoring.window),
        scale=scoring.scale,
        enable_gqa=scoring.heads != scoring.kv_heads,
    )
    return cast(Tensor, output).squeeze(0).transpose(0, 1).flatten(1)


def _plain() -> Callable[..., Any]:
    plain: Callable[..., Any] = flex_attention
    return plain


@cache
def _compiled() -> Callable[..., Any]:
    # Micro-batches differ in length.
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=True)
    return compiled


@cache
def _capped(softcap: float | None) -> Callable[..., Tensor] | None:
    if softcap is None:
        return None

    def capped(score: Tensor, *_places: Tensor) -> Tensor:
        return torch.tanh(score / softcap) * softcap

    return capped
