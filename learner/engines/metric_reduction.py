"""The metrics of an optimizer step over all micro-batches and ranks.

A loss runs on real micro-batches only, so a rank that has none does not know the names of its metrics. It learns them
from the others and contributes neutral values. Vectors of other lengths must not meet in a reduction: names and shapes
are compared before.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from rollmesh.learner.algorithms.metrics import Metrics, summarize
from rollmesh.learner.engines.world import World
from rollmesh.mesh.errors import ConfigError

# Sums of squares of this many codes, one of each rank, are exact in float64.
_CODES = 1 << 20


def reduce_metrics(world: World, parts: Sequence[Metrics], tokens: int, loss: Tensor) -> dict[str, float]:
    """Loss and metrics over everything; collective.

    Args:
        world: the ranks.
        parts: metrics of this rank's micro-batches; may be empty.
        tokens: trained tokens in them.
        loss: 0-d, sum of this rank's shares.

    Raises:
        ConfigError: on every rank, where micro-batches have metrics of different names or shapes.
    """
    forms = sorted({_form(part) for part in parts})
    code = zlib.crc32(b"".join(forms)) % _CODES
    # Codes are the same where their variance is 0; a rank that has several adds to it by itself.
    numbers = [float(bool(parts)), float(code), float(code * code + (len(forms) > 1))]
    sent = [loss.double(), *(loss.new_full((), number, dtype=torch.float64) for number in numbers)]
    # One reading for all: the host waits for the device with each.
    total, present, codes, squares = world.sum(torch.stack(sent)).tolist()
    metrics = {"loss": total}
    if not present:
        return metrics
    if int(present) * int(squares) != int(codes) ** 2:
        raise _not_the_same(world, forms)
    if present < world.processes:
        messages = world.gather_bytes(forms[0] if forms else b"")
        parts = parts or [_neutral(json.loads(next(message for message in messages if message)))]
    reduce = {"reduce_sum": world.sum, "reduce_max": world.max} if world.processes > 1 else {}
    return metrics | summarize(parts, tokens, **reduce)


def _form(part: Metrics) -> bytes:
    """Names and shapes of metrics by kind."""
    kinds = {kind.name: getattr(part, kind.name) for kind in dataclasses.fields(Metrics)}
    shapes = {kind: {name: list(value.shape) for name, value in values.items()} for kind, values in kinds.items()}
    return json.dumps(shapes).encode()


def _not_the_same(world: World, forms: Sequence[bytes]) -> ConfigError:
    """The error of metrics that differ; collective."""
    messages = world.gather_bytes(b"\n".join(forms))
    everywhere = [json.loads(form) for message in messages for form in message.split(b"\n") if form]
    counts = Counter(
        (kind, name, tuple(shape)) for form in everywhere for kind in form for name, shape in form[kind].items()
    )
    odd = sorted({f"{kind} {name}" for (kind, name, _), count in counts.items() if count < len(everywhere)})
    return ConfigError(
        f"the loss gives metrics that not all micro-batches have in this form: {', '.join(odd) or 'their order'}",
        hint="give the same names and shapes for every micro-batch, zeros where there is nothing",
    )


def _neutral(shapes: dict[str, dict[str, list[int]]]) -> Metrics:
    """Metrics that change neither a sum nor a maximum."""
    fill = {kind: -torch.inf if kind == "maxima" else 0.0 for kind in shapes}
    return Metrics(
        **{
            kind: {name: torch.full(shape, fill[kind]) for name, shape in values.items()}
            for kind, values in shapes.items()
        }
    )
