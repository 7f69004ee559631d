"""The metrics of an optimizer step over all micro-batches and ranks.

A loss runs on real micro-batches only, so a rank that has none does not know the names of its metrics. It learns them
from the others and contributes neutral values.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import torch
from torch import Tensor

from rollmesh.learner.algorithms.metrics import Metrics, summarize
from rollmesh.learner.engines.world import World


def reduce_metrics(world: World, parts: Sequence[Metrics], tokens: int, loss: Tensor) -> dict[str, float]:
    """Loss and metrics over everything; collective.

    Args:
        world: the ranks.
        parts: metrics of this rank's micro-batches; may be none.
        tokens: trained tokens in them.
        loss: 0-d, sum of this rank's shares.
    """
    # One reading for both: the host waits for the device with each.
    total, present = world.sum(torch.stack((loss, loss.new_full((), float(bool(parts)))))).tolist()
    metrics = {"loss": total}
    if not present:
        return metrics
    if present < world.processes:
        messages = world.gather_bytes(_names(parts))
        parts = parts or [_neutral(json.loads(next(message for message in messages if message)))]
    reduce = {"reduce_sum": world.sum, "reduce_max": world.max} if world.processes > 1 else {}
    return metrics | summarize(parts, tokens, **reduce)


def _names(parts: Sequence[Metrics]) -> bytes:
    """Names and shapes of metrics by kind; nothing without metrics."""
    if not parts:
        return b""
    kinds = {kind.name: getattr(parts[0], kind.name) for kind in dataclasses.fields(Metrics)}
    shapes = {kind: {name: list(value.shape) for name, value in values.items()} for kind, values in kinds.items()}
    return json.dumps(shapes).encode()


def _neutral(shapes: dict[str, dict[str, list[int]]]) -> Metrics:
    """Metrics that change neither a sum nor a maximum."""
    fill = {kind: -torch.inf if kind == "maxima" else 0.0 for kind in shapes}
    return Metrics(
        **{
            kind: {name: torch.full(shape, fill[kind]) for name, shape in values.items()}
            for kind, values in shapes.items()
        }
    )
