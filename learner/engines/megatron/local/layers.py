"""Layers for a CPU in place of Transformer Engine's: normalization, and attention of packed sequences, also divided.

Megatron's own norm refuses sequence parallelism, and its own attention packed sequences and context parallelism.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from torch.nn.functional import embedding, scaled_dot_product_attention

from rollmesh.learner.batching.types import Segments
from rollmesh.learner.engines.fsdp2.attention_calls import AttentionCall, ExactLayout, build_layout
from rollmesh.learner.engines.megatron.zigzag import places_of


class LocalRMSNorm(nn.Module):
    """Root mean square normalization as transformers computes it (arXiv:1910.07467).

    Args:
        config: Megatron's.
        hidden_size: of the last dimension.
        eps: added to the mean square.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Each process of a tensor-parallel group has gradients of its own tokens: Megatron sums what has this mark.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # Megatron's mark

    def forward(self, states: Tensor) -> Tensor:
        """The states, normalized, in their dtype."""
        wide = states.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(states.dtype)


class LocalAttention(MegatronModule):
    """Causal attention of packed sequences, exact; keys and values of a divided sequence are gathered.

    Args:
        config: Megatron's.
        pg_collection: has the context-parallel group.
        softmax_scale: of the scores; None: that of the head's width.
    """

    def __init__(self, config: Any, *_: Any, pg_collection: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__(config=config)
        self._group = pg_collection.cp
        self._scale = softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Any = None, **__: Any
    ) -> Tensor:
        """The attention's output.

        Args:
            query: [t, heads, width], tokens of this process, sequence after sequence.
            key, value: [t, groups, width].
            packed_seq_params: says where sequences begin, padding included.

        Returns:
            [t, heads * width].
        """
        starts = packed_seq_params.cu_seqlens_q_padded
        if self._group.size() > 1:
            return self._divided(query, key, value, starts)
        layout = _layout(tuple(starts.diff().tolist()))
        outputs = [self._call(query, key, value, call) for call in layout.calls]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return output if layout.restore is None else embedding(layout.restore, output)

    def _call(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        """Attention of sequences of similar lengths, [sequences * longest, heads * width]."""
        count, longest, _ = call.shape
        rows = (
            embedding(call.queries, tensor.flatten(1)).view(count, longest, *tensor.shape[1:])
            for tensor in (query, key, value)
        )
        return self._attend(*rows).flatten(0, 1)

    def _divided(self, query: Tensor, key: Tensor, value: Tensor, starts: Tensor) -> Tensor:
        size, rank = self._group.size(), self._group.rank()
        key, value = (
            gather_from_sequence_parallel_region(tensor.contiguous(), True, self._group) for tensor in (key, value)
        )
        lengths = starts.diff().numpy()
        own = torch.from_numpy(places_of(lengths, size, rank))
        every = torch.cat([torch.from_numpy(places_of(lengths, size, other)) for other in range(size)])
        sequence = torch.bucketize(torch.arange(int(starts[-1])), starts[1:], right=True)
        seen = (sequence[own][:, None] == sequence[every]) & (own[:, None] >= every)
        return self._attend(query[None], key[None], value[None], seen)[0]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None = None) -> Tensor:
        """The output [rows, length, heads * width] of rows of tokens; without a mask, each row is a sequence."""
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=seen, is_causal=seen is None, scale=self._scale, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(2)


# All layers ask for the same one, and many short sequences would be many small calls.
@functools.lru_cache(maxsize=8)
def _layout(lengths: tuple[int, ...]) -> ExactLayout:
    """The calls for sequences side by side."""
    sizes = np.array(lengths, dtype=np.int64)
    none = np.zeros_like(sizes)
    return build_layout(Segments(sizes.cumsum() - sizes, sizes, none, none), torch.device("cpu"))
