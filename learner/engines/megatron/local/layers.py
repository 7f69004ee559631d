"""Layers for a CPU in place of Transformer Engine's: normalization, and attention of packed sequences, also divided.

Megatron's own norm refuses sequence parallelism, and its own attention packed sequences and context parallelism.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from torch.nn import functional

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
        lengths = starts.diff().tolist()
        sequences = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
        return torch.cat([self._attend(*sequence) for sequence in sequences])

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
        return self._attend(query, key, value, seen)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None = None) -> Tensor:
        """The output [t, heads * width]; without a mask, of one sequence."""
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        out = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, is_causal=seen is None, scale=self._scale, enable_gqa=True
        )
        return out[0].transpose(0, 1).flatten(1)
