"""Ready-made attention masks, additive, in the form that transformers passes on unchanged.

A model with layers of one type gets a 4-D tensor. One that mixes full and sliding-window layers gets a dict
from layer type to 4-D tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

AttentionMask = torch.Tensor | dict[str, torch.Tensor]


class MaskBuilder:
    """Builds masks for prefill and decoding.

    Args:
        layer_types: of the model's layers.
        window: tokens that a sliding layer sees, the current one included.
        dtype: of the model.
        device: of the model.
    """

    def __init__(
        self, layer_types: Sequence[str], window: int | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._types = tuple(dict.fromkeys(layer_types))
        self._window = window
        self._hidden = torch.finfo(dtype).min
        self._dtype = dtype
        self._columns = torch.arange(0, device=device)

    def decode(self, positions: torch.Tensor, columns: int) -> AttentionMask:
        """Masks for one query per row at `positions` (int64 [rows]) over `columns` columns: [rows, 1, 1, columns]."""
        return self._build(positions[:, None, None, None], columns)

    def prefill(self, begin: int, end: int) -> AttentionMask | None:
        """Masks for tokens [begin, end) of right-padded prompts: [1, 1, end - begin, end].

        Padding is seen by padding alone. None from the start where each token sees all before it: attention then needs
        no mask, and less memory.
        """
        if begin == 0 and self._types == ("full_attention",):
            return None
        self._grow(end)
        return self._build(self._columns[begin:end, None], end)

    def _build(self, positions: torch.Tensor, columns: int) -> AttentionMask:
        self._grow(columns)
        column = self._columns[:columns]
        future = column > positions
        if len(self._types) == 1 and self._types[0] == "full_attention":
            return self._additive(future)
        masks = {}
        for kind in self._types:
            # Within the window nothing is cut off: both types then share one mask.
            if kind == "full_attention" or self._window is None or columns <= self._window:
                hidden = future
            else:
                hidden = future | (column <= positions - self._window)
            masks[kind] = self._additive(hidden)
        return masks if len(masks) > 1 else masks[self._types[0]]

    def _additive(self, hidden: torch.Tensor) -> torch.Tensor:
        mask = hidden.to(self._dtype).mul_(self._hidden)
        return mask if mask.dim() == 4 else mask[None, None]

    def _grow(self, columns: int) -> None:
        if columns > self._columns.shape[0]:
            self._columns = torch.arange(max(64, 2 * columns), device=self._columns.device)
