"""The size of the KV cache, and which sequences fit into it: pure decisions, and one default.

The storage of every layer is one rectangle, rows by columns of tokens, so that a decode step reads it without a copy.
Invariants: rows x columns never exceed the budget. Storage grows by doubling while the budget allows that, then to what
is needed. It is halved where a quarter would do, so that its cost stays constant per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollmesh.mesh.runtime.host_memory import free_host_bytes

# Columns come in such steps.
COLUMNS = 64
_CPU_SHARE = 0.5
_GPU_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Shape:
    """Storage for `rows` sequences of `columns` tokens."""

    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Budget:
    """The bound of an allocation.

    Attributes:
        tokens: the most tokens with stored keys and values, padding included.
        slots: most rows.
    """

    tokens: int
    slots: int

    def fits(self, rows: int, columns: int) -> bool:
        """True where `rows` sequences fit, the longest of which has `columns` tokens."""
        return rows <= self.slots and rows * rounded(columns) <= self.tokens

    def usage(self, rows: int, columns: int) -> float:
        """The share of the budget that they take."""
        return min(1.0, rows * rounded(columns) / self.tokens)

    def shape(self, have: Shape, rows: int, columns: int) -> Shape:
        """The storage for `rows` sequences of at most `columns` tokens, which fit, where there is `have`."""
        if rows <= have.rows and columns <= have.columns:
            return Shape(_shrunk(have.rows, rows, 1), _shrunk(have.columns, columns, COLUMNS))
        wide = Shape(min(self.slots, _grown(rows, 1)), _grown(columns, COLUMNS))
        for count in (wide.rows, rows):
            longest = min(wide.columns, self.tokens // count // COLUMNS * COLUMNS)
            if longest >= columns:
                return Shape(count, longest)
        return Shape(rows, rounded(columns))


def rounded(columns: int) -> int:
    """The next multiple of `COLUMNS`."""
    return -(-columns // COLUMNS) * COLUMNS


def free_bytes(device: torch.device, weights: int, sharing: int = 1) -> int:
    """Bytes that keys and values may take by default on a device that holds its weights.

    Args:
        device: of the model.
        weights: bytes of a second set, which every update brings in addition to the one in service.
        sharing: processes that measure and take the same memory, this one included.
    """
    weights *= sharing
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return max(0, int(_GPU_SHARE * (free - weights)) // sharing)
    return max(0, int(_CPU_SHARE * (free_host_bytes() - weights)) // sharing)


def _grown(count: int, start: int) -> int:
    while start < count:
        start *= 2
    return start


def _shrunk(have: int, needed: int, least: int) -> int:
    return max(least, have // 2) if 4 * needed <= have else have
