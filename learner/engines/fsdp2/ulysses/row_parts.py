"""The part of a packed row that one process computes: pure index arithmetic.

The N tokens are divided into runs of equal length, whatever sequences they belong to. Where N does not divide, padding
at the end makes a segment of its own, so that it reaches no other token. A trained token belongs to the part that holds
its predictor, so parts may have different numbers of them, also none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from rollmesh.learner.batching.token_responses import responses_of_tokens
from rollmesh.learner.batching.transfer import to_device
from rollmesh.learner.batching.types import PackedRow, Segments


@dataclass(frozen=True, slots=True, eq=False)
class RowPart:
    """One part: n tokens, and the r trained tokens that they predict.

    Attributes:
        input_ids: int64 [1, n].
        position_ids: int64 [1, n]; or [3, 1, n], see `PackedRow`.
        segments: of the whole row, padding included.
        predictors: int64 [r], places within the part.
        labels: int64 [r], ids of the trained tokens.
        temperatures: float32 [r], or one float.
        most: the largest r of all parts.
        places: int64 [R], where each trained token of the row stands in the values of all parts, each padded to `most`.
            None: this part is the whole row.
        responses: float32 [n], trained responses that each token belongs to; 0 for padding.
        routed_experts: as of the row, of the part's tokens.
    """

    input_ids: Tensor
    position_ids: Tensor
    segments: Segments
    predictors: NDArray[np.int64]
    labels: Tensor
    temperatures: Tensor | float
    most: int
    places: Tensor | None
    responses: NDArray[np.float32]
    routed_experts: Tensor | None = None


def part_of(row: PackedRow, part: int, parts: int) -> RowPart:
    """One of the parts of a row.

    Args:
        row: of a micro-batch.
        part: 0 .. parts - 1.
        parts: processes that share the row.
    """
    if parts == 1:
        count = len(row.predictors)
        return RowPart(
            row.input_ids,
            row.position_ids,
            row.segments,
            row.predictors,
            row.labels,
            row.temperatures,
            count,
            None,
            responses_of_tokens(row),
            row.routed_experts,
        )
    device = row.labels.device
    tokens = row.input_ids.shape[1]
    length = -(-tokens // parts)
    padding = length * parts - tokens
    own = slice(part * length, (part + 1) * length)
    owners = row.predictors // length
    counts = np.bincount(owners, minlength=parts)
    most = int(counts.max())
    # A token's place among those of its part: they keep the order of the row.
    order = np.argsort(owners, kind="stable")
    places = np.empty_like(order)
    places[order] = np.arange(len(order)) + np.repeat(np.arange(parts) * most - (counts.cumsum() - counts), counts)
    mine = np.flatnonzero(owners == part)
    on_device = to_device(mine, device)
    temperatures = row.temperatures
    return RowPart(
        input_ids=functional.pad(row.input_ids, (0, padding))[:, own],
        position_ids=functional.pad(row.position_ids, (0, padding))[..., own],
        segments=_padded(row.segments, tokens, padding),
        predictors=row.predictors[mine] - own.start,
        labels=row.labels[on_device],
        temperatures=temperatures[on_device] if isinstance(temperatures, torch.Tensor) else temperatures,
        most=most,
        places=to_device(places, device),
        responses=np.pad(responses_of_tokens(row), (0, padding))[own],
        routed_experts=_padded_experts(row.routed_experts, padding, own),
    )


def _padded_experts(experts: Tensor | None, padding: int, own: slice) -> Tensor | None:
    return None if experts is None else functional.pad(experts, (0, 0, 0, 0, 0, padding), value=-1)[own]


def _padded(segments: Segments, tokens: int, padding: int) -> Segments:
    if not padding:
        return segments
    return Segments(
        np.append(segments.starts, tokens),
        np.append(segments.lengths, padding),
        np.append(segments.prefix_starts, 0),
        np.append(segments.prefix_lengths, 0),
    )
