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

_FIRST_CAPACITY = 64


class StepView:
    """Which part of the storage the present decode step touches; shared by all layers.

    Attributes:
        rows: active rows.
        columns: columns that attention reads; one more than the largest position.
        positions: int64 [rows], the column that each row's token is written to.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self.rows = 0
        self.columns = 0
        self.positions = torch.zeros(0, dtype=torch.int64, device=device)
        self._slots = torch.arange(slots, device=device)
        self._flat: dict[tuple[int, int], torch.Tensor] = {}

    def begin(self, positions: torch.Tensor, columns: int) -> None:
        """Sets the step's rows [0, len(positions)) and columns."""
        self.rows = positions.shape[0]
        self.columns = columns
        self.positions = positions
        self._flat.clear()

    def flat_index(self, heads: int, capacity: int) -> torch.Tensor:
        """int64 [rows * heads]: where each (row, head) writes, in storage seen as [slots * heads * capacity, dim]."""
        index = self._flat.get((heads, capacity))
        if index is None:
            base = self._slots[: self.rows, None] * (heads * capacity) + self.positions[:, None]
            index = (base + torch.arange(0, heads * capacity, capacity, device=base.device)).view(-1)
            self._flat[heads, capacity] = index
        return index


class SlotLayer(CacheLayerMixin):
    """One layer's storage: keys and values [slots, kv_heads, capacity, head_dim], allocated at first use."""

    def __init__(self, slots: int, step: StepView, *, is_sliding: bool) -> None:
        super().__init__()
        self.slots = slots
        self.step = step
        self.is_sliding = is_sliding

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocates for the heads, dimensions and dtype of the given states [*, heads, *, dim]."""
        self.keys = self._allocate(key_states, _FIRST_CAPACITY)
        self.values = self._allocate(value_states, _FIRST_CAPACITY)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes one token per active row ([rows, heads, 1, dim]) and returns what attention reads."""
        step, keys, values = self.step, self.keys, self.values
        _, heads, capacity, dim = keys.shape
        index = step.flat_index(heads, capacity)
        keys.view(-1, dim).index_copy_(0, index, key_states.reshape(-1, dim))
        dim = values.shape[3]
        values.view(-1, dim).index_copy_(0, index, value_states.reshape(-1, dim))
        return keys[: step.rows, :, : step.columns], values[: step.rows, :, : step.columns]

    def reserve(self, capacity: int, used_rows: int) -> None:
        """Grows to at least `capacity` columns; the first `used_rows` rows are kept."""
        have = self.keys.shape[2]
        if capacity <= have:
            return
        new = have
        while new < capacity:
            new *= 2
        for name in ("keys", "values"):
            old = getattr(self, name)
            grown = self._allocate(old, new)
            grown[:used_rows, :, :have] = old[:used_rows]
            setattr(self, name, grown)

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

    def _allocate(self, like: torch.Tensor, capacity: int) -> torch.Tensor:
        # Zeros, not empty: columns past a row's end are masked, and a masked NaN would still spoil the sum.
        return like.new_zeros((self.slots, like.shape[1], capacity, like.shape[3]))


class SlotCache(Cache):
    """The storage of all layers."""

    def __init__(self, slots: int, layer_types: Sequence[str], device: torch.device) -> None:
        self.step = StepView(slots, device)
        self.slot_layers = [SlotLayer(slots, self.step, is_sliding=kind == "sliding_attention") for kind in layer_types]
        super().__init__(layers=list(self.slot_layers))

    def reserve(self, capacity: int, used_rows: int) -> None:
        """Makes room for `capacity` columns in every layer that is in use."""
        for layer in self.slot_layers:
            if layer.is_initialized:
                layer.reserve(capacity, used_rows)

    def store(self, rows: torch.Tensor, prefix: PrefixCache, source: torch.Tensor, used_rows: int) -> None:
        """Copies prefixes `source` (int64, rows of `prefix`) to the slots `rows` (int64)."""
        for layer, states in zip(self.slot_layers, prefix.prefix_layers, strict=True):
            if not states.is_initialized:  # a layer that shares another's states
                continue
            if not layer.is_initialized:
                layer.lazy_initialization(states.keys, states.values)
            layer.reserve(states.keys.shape[2], used_rows)
            layer.store(rows, states.keys.index_select(0, source), states.values.index_select(0, source))

    def move(self, source: int, target: int, columns: int) -> None:
        """Moves a sequence of `columns` tokens from slot `source` to slot `target`."""
        for layer in self.slot_layers:
            if layer.is_initialized:
                layer.move(source, target, columns)


class PrefixLayer(CacheLayerMixin):
    """One layer of a prefill: keeps the states of the only forward pass as they come."""

    is_sliding = False

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
