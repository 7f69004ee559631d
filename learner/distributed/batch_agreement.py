"""One result of the batch stage for all ranks: rank 0's.

Every rank runs the stage on the same data, and mostly comes to the same result. But sums on a GPU depend on the order
of their terms, and a user's code may draw or iterate as it likes. A threshold then falls differently, and ranks that
keep different tokens count a different batch. So ranks compare checksums, and only differing values travel.

Invariants: afterwards every rank holds the same values to the bit, with the names and shapes of rank 0. Where all
agree, a few hundred bytes have travelled and no value has left its device.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rollmesh.learner.engines.interface import Engine

# Elements that are summed up at once; their weights are as many.
_CHUNK = 1 << 20
# An odd multiplier that spreads over 64 bits.
_STRIDE = 0x9E3779B97F4A7C15 - (1 << 64)
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def agree_on_values(engine: Engine, values: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """The values to replace on this rank, so that all ranks hold those of rank 0; collective.

    Args:
        engine: of the ranks.
        values: this rank's, by name; None: no value.

    Returns:
        Rank 0's values of every name of which some rank had another value; the same names on all ranks.
    """
    if engine.layout.processes == 1:
        return {}
    described_by_rank = [json.loads(on_rank) for on_rank in engine.world.gather_bytes(_describe(values))]
    first: dict[str, list[Any] | None] = described_by_rank[0]
    names = [*first, *sorted({name for on_rank in described_by_rank for name in on_rank} - set(first))]
    replaced: dict[str, Tensor | None] = {}
    for name in names:
        described = first.get(name)
        if any(on_rank.get(name) != described for on_rank in described_by_rank):
            replaced[name] = None if described is None else _broadcast_rank_0(engine, values.get(name), described)
    return replaced


def agree_on_state(engine: Engine, state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Rank 0's state (JSON) where some rank's differs, else None; collective."""
    if engine.layout.processes == 1:
        return None
    states = engine.world.gather_bytes(json.dumps(state, sort_keys=True).encode())
    if all(other == states[0] for other in states):
        return None
    found: dict[str, Any] = json.loads(states[0])
    return found


def checksum(values: Tensor) -> Tensor:
    """A sum over the bits of all elements and their places, int64, 0-d, on the values' device.

    Exact whatever the order of the additions, as integers are: equal values have equal checksums on every device.
    """
    words = values.detach().contiguous().flatten().view(_WORDS[values.element_size()])
    weights = torch.arange(min(_CHUNK, words.numel()), device=values.device) * _STRIDE | 1
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for chunk in words.split(_CHUNK):
        total = total * _STRIDE + ((chunk.to(torch.int64) + 1) * weights[: chunk.numel()]).sum()
    return total


def _describe(values: Mapping[str, Tensor | None]) -> bytes:
    """Dtype, shape and checksum by name, as JSON."""
    there = {name: found for name, found in values.items() if found is not None}
    sums = torch.stack([checksum(found) for found in there.values()]).tolist() if there else []
    described: dict[str, list[Any] | None] = dict.fromkeys(values)
    for (name, found), total in zip(there.items(), sums, strict=True):
        described[name] = [str(found.dtype).removeprefix("torch."), list(found.shape), total]
    return json.dumps(described).encode()


def _broadcast_rank_0(engine: Engine, own: Tensor | None, described: list[Any]) -> Tensor:
    """Rank 0's tensor."""
    dtype, shape, _ = described
    if not engine.layout.leads or own is None:
        own = torch.empty(shape, dtype=getattr(torch, dtype), device=engine.device)
    return engine.world.broadcast(own.detach())
