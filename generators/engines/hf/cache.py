"""Key-value storage of the running sequences, behind transformers' public cache interface.

Invariants: row r of every layer belongs to slot r; its columns [0, position of r) hold that sequence's keys and
values. A forward pass of the decode loop hands in one token per row of [0, rows) and each goes to its row's own
column, in place; attention then reads columns [0, columns) of those rows, and the mask hides what is not the row's.
Nothing is ever concatenated; storage doubles when a sequence outgrows it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

FIRST_CAPACITY = 64


class StepView:
    """Which part of the storage the present decode step touches; shared by all layers.

    Attributes:
        rows: active rows.
        columns: columns that attention reads; one more than the largest position.
        index: by number of heads, int64 [rows * heads]: where each (row, head) writes its token, in storage seen as
            [slots * heads * capacity, head_dim].
    """

    def __init__(self) -> None:
        self.rows = 0
        self.columns = 0
        self.index: dict[int, torch.Tensor] = {}


class SlotLayer(CacheLayerMixin):
    """One layer's storage: keys and values [slots, kv_heads, capacity, head_dim], allocated at first use."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, slots: int, step: StepView, *, is_sliding: bool) -> None:
        super().__init__()
        self.slots = slots
        self.step = step
        self.is_sliding = is_sliding
        self.heads = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocates for the heads, dimensions and dtype of the given states [*, heads, *, dim]."""
        self.keys = self._allocate(key_states, FIRST_CAPACITY)
        self.values = self._allocate(value_states, FIRST_CAPACITY)
        self.heads = key_states.shape[1]
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes one token per active row ([rows, heads, 1, dim]) and returns what attention reads."""
        step, keys, values = self.step, self.keys, self.values
        index = step.index[self.heads]
        _write(keys, index, key_states)
        _write(values, index, value_states)
        return keys[: step.rows, :, : step.columns], values[: step.rows, :, : step.columns]

    def grow(self, capacity: int, used_rows: int) -> None:
        """Makes room for `capacity` columns; the first `used_rows` rows are kept."""
        self.keys = self._grown(self.keys, capacity, used_rows)
        self.values = self._grown(self.values, capacity, used_rows)

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

    def _grown(self, old: torch.Tensor, capacity: int, used_rows: int) -> torch.Tensor:
        new = self._allocate(old, capacity)
        new[:used_rows, :, : old.shape[2]] = old[:used_rows]
        return new

    def _allocate(self, like: torch.Tensor, capacity: int) -> torch.Tensor:
        # Zeros, not empty: columns past a row's end are masked, and a masked NaN would still spoil the sum.
        return like.new_zeros((self.slots, like.shape[1], capacity, like.shape[3]))


def _write(storage: torch.Tensor, index: torch.Tensor, states: torch.Tensor) -> None:
    dim = states.shape[3]
    storage.view(-1, dim).index_copy_(0, index, states.reshape(-1, dim))


class SlotCache(Cache):
    """The storage of all layers; they have one capacity."""

    def __init__(self, slots: int, layer_types: Sequence[str], device: torch.device) -> None:
        self.step = StepView()
        self.capacity = FIRST_CAPACITY
        self.slot_layers = [SlotLayer(slots, self.step, is_sliding=kind == "sliding_attention") for kind in layer_types]
        self._rows = torch.arange(slots, device=device)[:, None]
        # By number of heads: the flat index of column 0 of each (row, head), [slots, heads].
        self._starts: dict[int, torch.Tensor] = {}
        super().__init__(layers=list(self.slot_layers))

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
            columns: one more than the largest position.
        """
        rows = positions.shape[0]
        if columns > self.capacity:
            self._grow(columns, rows)
        self.step.rows = rows
        self.step.columns = columns
        self.step.index = {
            heads: (starts[:rows] + positions[:, None]).view(-1) for heads, starts in self._starts.items()
        }

    def store(self, rows: torch.Tensor, prefix: PrefixCache, source: torch.Tensor, used_rows: int) -> None:
        """Copies prefixes `source` (int64, members of `prefix`) to the slots `rows` (int64).

        Args:
            rows: int64 [n].
            prefix: a prefill.
            source: int64 [n].
            used_rows: rows to keep where storage has to grow.
        """
        for layer, states in zip(self.slot_layers, prefix.prefix_layers, strict=True):
            if not states.is_initialized:
                continue
            if not layer.is_initialized:
                layer.lazy_initialization(states.keys, states.values)
                layer.grow(self.capacity, 0)
                self._index_starts()
            columns = states.keys.shape[2]
            if columns > self.capacity:
                self._grow(columns, used_rows)
            layer.store(rows, states.keys.index_select(0, source), states.values.index_select(0, source))

    def move(self, source: int, target: int, columns: int) -> None:
        """Moves a sequence of `columns` tokens from slot `source` to slot `target`."""
        for layer in self.used_layers:
            layer.move(source, target, columns)

    def _grow(self, columns: int, used_rows: int) -> None:
        while self.capacity < columns:
            self.capacity *= 2
        for layer in self.used_layers:
            layer.grow(self.capacity, used_rows)
        self._index_starts()

    def _index_starts(self) -> None:
        for heads in {layer.heads for layer in self.used_layers}:
            head = torch.arange(heads, device=self._rows.device)
            self._starts[heads] = (self._rows * heads + head) * self.capacity


class PrefixLayer(CacheLayerMixin):
    """One layer of a prefill: keeps the states of the only forward pass as they come."""

    is_sliding = False
    keys: torch.Tensor
    values: torch.Tensor

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys, self.values = key_states, value_states
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.lazy_initialization(key_states, value_states)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class PrefixCache(Cache):
    """Keys and values [prompts, kv_heads, columns, head_dim] of one prefill, right-padded."""

    def __init__(self, layers: int) -> None:
        self.prefix_layers = [PrefixLayer() for _ in range(layers)]
        super().__init__(layers=list(self.prefix_layers))
