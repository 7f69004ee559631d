"""Key-value storage of the running sequences, in the form of transformers' public cache interface.

Invariants: row r of every layer belongs to slot r; its columns [0, position of r) hold that sequence's keys and
values. A forward pass of the decode loop brings one token per row of [0, rows), and writes it to its row's own column,
in place. Attention then reads columns [0, columns) of those rows, and the mask hides what is not the row's. Nothing is
ever concatenated. The number of rows and columns is decided elsewhere (`kv_budget`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from rollmesh.generators.engines.hf.kv_budget import Shape


class DecodeStepView:
    """The size of the storage, and the part of it that the present decode step touches; shared by all layers.

    Attributes:
        shape: of the storage.
        rows: active rows.
        columns: columns that attention reads; one more than the largest position.
        index: by number of heads, int64 [rows * heads]: where each (row, head) writes its token. The storage is seen as
            [rows of the storage * heads * its columns, head_dim].
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.rows = 0
        self.columns = 0
        self.index: dict[int, torch.Tensor] = {}


class SlotLayer(CacheLayerMixin):
    """One layer's storage: keys and values [rows, kv_heads, columns, head_dim], allocated at first use."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, step: DecodeStepView, *, is_sliding: bool) -> None:
        super().__init__()
        self.step = step
        self.is_sliding = is_sliding
        self.heads = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocates for the heads, dimensions and dtype of the given states [*, heads, *, dim]."""
        self.keys = self._allocate(key_states, self.step.shape)
        self.values = self._allocate(value_states, self.step.shape)
        self.heads = key_states.shape[1]
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes one token per active row ([rows, heads, 1, dim]) and returns the tensors that attention reads."""
        step, keys, values = self.step, self.keys, self.values
        index = step.index[self.heads]
        _write(keys, index, key_states)
        _write(values, index, value_states)
        return keys[: step.rows, :, : step.columns], values[: step.rows, :, : step.columns]

    def resize(self, shape: Shape, used_rows: int) -> None:
        """Gives the storage this shape; the first `used_rows` rows are kept, as far as they fit."""
        self.keys = self._resized(self.keys, shape, used_rows)
        self.values = self._resized(self.values, shape, used_rows)

    def store(self, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes whole prefixes [len(rows), heads, columns, dim] to the start of `rows`."""
        columns = keys.shape[2]
        self.keys[rows, :, :columns] = keys
        self.values[rows, :, :columns] = values

    def move(self, source: int, target: int, columns: int) -> None:
        """Copies the first `columns` columns of row `source` to row `target`."""
        self.keys[target, :, :columns] = self.keys[source, :, :columns]
        self.values[target, :, :columns] = self.values[source, :, :columns]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002 - the interface's signature
        return self.step.columns, 0

    def get_seq_length(self) -> int:
        return self.step.columns - 1

    def get_max_length(self) -> int:
        return -1

    def _resized(self, old: torch.Tensor, shape: Shape, used_rows: int) -> torch.Tensor:
        new, columns = self._allocate(old, shape), min(old.shape[2], shape.columns)
        new[:used_rows, :, :columns] = old[:used_rows, :, :columns]
        return new

    def _allocate(self, like: torch.Tensor, shape: Shape) -> torch.Tensor:
        # Zeros, not empty: columns past a row's end are masked, and a masked NaN would still spoil the sum.
        return like.new_zeros((shape.rows, like.shape[1], shape.columns, like.shape[3]))


def _write(storage: torch.Tensor, index: torch.Tensor, states: torch.Tensor) -> None:
    dim = states.shape[3]
    storage.view(-1, dim).index_copy_(0, index, states.reshape(-1, dim))


class SlotCache(Cache):
    """The storage of all layers; they have one shape."""

    def __init__(self, shape: Shape, layer_types: Sequence[str], device: torch.device) -> None:
        self.step = DecodeStepView(shape)
        self.slot_layers = [SlotLayer(self.step, is_sliding=kind == "sliding_attention") for kind in layer_types]
        self._device = device
        # By number of heads: the flat index of column 0 of each (row, head), [rows, heads].
        self._starts: dict[int, torch.Tensor] = {}
        super().__init__(layers=list(self.slot_layers))

    @property
    def shape(self) -> Shape:
        """Rows and columns of the storage."""
        return self.step.shape

    @property
    def used_layers(self) -> list[SlotLayer]:
        """Layers that store something; a layer that shares another's states does not."""
        return [layer for layer in self.slot_layers if layer.is_initialized]

    @property
    def nbytes(self) -> int:
        """Bytes of the storage."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.used_layers)

    def begin(self, positions: torch.Tensor, columns: int) -> None:
        """Prepares a decode step: row r of [0, len(positions)) writes column `positions[r]` (int64).

        Args:
            positions: int64 [rows].
            columns: one more than the largest position; there are as many.
        """
        rows = positions.shape[0]
        self.step.rows = rows
        self.step.columns = columns
        self.step.index = {
            heads: (starts[:rows] + positions[:, None]).view(-1) for heads, starts in self._starts.items()
        }

    def store(self, rows: torch.Tensor, prefix: PrefixCache, source: torch.Tensor) -> None:
        """Copies prefixes `source` (int64, members of `prefix`) to the slots `rows` (int64).

        Args:
            rows: int64 [n].
            prefix: a prefill.
            source: int64 [n].
        """
        for layer, states in zip(self.slot_layers, prefix.prefix_layers, strict=True):
            if not states.is_initialized:
                continue
            if not layer.is_initialized:
                layer.lazy_initialization(states.keys, states.values)
                self._index_starts()
            # Others of the same pass may be longer than there is room for: there they have padding.
            keys, values = (part[:, :, : self.shape.columns] for part in (states.keys, states.values))
            layer.store(rows, keys.index_select(0, source), values.index_select(0, source))

    def move(self, source: int, target: int, columns: int) -> None:
        """Moves a sequence of `columns` tokens from slot `source` to slot `target`."""
        for layer in self.used_layers:
            layer.move(source, target, columns)

    def resize(self, shape: Shape, used_rows: int) -> None:
        """Gives all layers this shape; the first `used_rows` rows are kept, as far as they fit.

        Raises:
            RuntimeError: there is no memory for it; this cache cannot be used any more.
        """
        self.step.shape = shape
        for layer in self.used_layers:
            layer.resize(shape, used_rows)
        self._index_starts()

    def _index_starts(self) -> None:
        row = torch.arange(self.shape.rows, device=self._device)[:, None]
        for heads in {layer.heads for layer in self.used_layers}:
            head = torch.arange(heads, device=self._device)
            self._starts[heads] = (row * heads + head) * self.shape.columns


class PrefixLayer(CacheLayerMixin):
    """One layer of a prefill of `columns` tokens, which come in one forward pass or in several."""

    is_sliding = False
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, columns: int) -> None:
        super().__init__()
        self._columns = columns
        self._seen = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if key_states.shape[2] == self._columns:
            self.keys, self.values = key_states, value_states
        else:
            self.keys, self.values = self._allocate(key_states), self._allocate(value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        begin, self._seen = self._seen, self._seen + key_states.shape[2]
        if self.keys is not key_states:
            self.keys[:, :, begin : self._seen] = key_states
            self.values[:, :, begin : self._seen] = value_states
        return self.keys[:, :, : self._seen], self.values[:, :, : self._seen]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._seen + query_length, 0

    def get_seq_length(self) -> int:
        return self._seen

    def get_max_length(self) -> int:
        return -1

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_empty((*like.shape[:2], self._columns, like.shape[3]))


class PrefixCache(Cache):
    """Keys and values [prompts, kv_heads, columns, head_dim] of one prefill, right-padded."""

    def __init__(self, layers: int, columns: int) -> None:
        self.prefix_layers = [PrefixLayer(columns) for _ in range(layers)]
        super().__init__(layers=list(self.prefix_layers))

    @property
    def nbytes(self) -> int:
        """Bytes of all layers that keep something."""
        used = [layer for layer in self.prefix_layers if layer.is_initialized]
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in used)
