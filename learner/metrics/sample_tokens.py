"""Values of a kept sample's tokens, as `samples.jsonl` has them under `tokens`; docs/tracking.md names the fields.

Each field has an entry per token, from the first token on. An entry `[n, x]` stands for n tokens of the value x, so
constant stretches are short. Numbers have four digits after the point at most, null is a value that is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollmesh.mesh.trajectory.payload_codec import Trajectory
from rollmesh.mesh.trajectory.text_division import characters_per_token
from rollmesh.mesh.trajectory.versions import PolicyVersion

Entries = list[Any]
"""Values of tokens, and runs [n, value] of equal ones."""
_DIGITS = 4


def describe_tokens(
    trajectory: Trajectory,
    text: str,
    decode: Callable[[Sequence[int]], str],
    values: Mapping[str, NDArray[np.float32]],
    staleness: Callable[[PolicyVersion], int],
    *,
    most: int,
) -> dict[str, Any]:
    """The record of a response's tokens.

    Args:
        trajectory: the response.
        text: of the whole response.
        decode: of the tokenizer.
        values: of the tokens with mask 1, by name.
        staleness: of a version, when the response was trained.
        most: tokens that are described.
    """
    mask = trajectory.response_mask.astype(bool)
    part = trajectory.part(0, most)
    known = {"log_probs": trajectory.log_probs[mask], **values}
    ages = (age for length, version in part.versions.runs for age in [staleness(version)] * length)
    record: dict[str, Any] = {
        "count": len(trajectory),
        "characters": to_entries(characters_per_token(part.response_ids.tolist(), text, decode)),
        "mask": to_entries(part.response_mask.tolist()),
        "staleness": to_entries(ages),
    }
    for name, trained in known.items():
        whole = np.full(len(trajectory), np.nan, np.float32)
        whole[mask] = trained
        entries = to_entries(map(_rounded, whole[:most].tolist()))
        # A response without an advantage may need no forward pass.
        if any(value is not None for _, value in _runs(entries)):
            record[name] = entries
    return record


def to_entries(values: Iterable[Any]) -> Entries:
    """Values in order, runs of three and more as [n, value]."""
    entries: Entries = []
    for value, run in groupby(values):
        count = sum(1 for _ in run)
        entries += [[count, value]] if count > 2 else [value] * count
    return entries


def _runs(entries: Entries) -> Iterable[tuple[int, Any]]:
    return ((entry[0], entry[1]) if isinstance(entry, list) else (1, entry) for entry in entries)


def _rounded(value: float) -> float | None:
    return round(value, _DIGITS) if np.isfinite(value) else None
