"""The reference policy's log-probs: computed once, with the initial weights, and kept for a run that continues.

Sums over a response's tokens are enough. They take 8 bytes per response, where log-probs would take 4 per token.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollmesh.learner.algorithms.ragged import segment_sum
from rollmesh.learner.data.examples import Example, ExampleSource
from rollmesh.learner.engines.interface import Engine
from rollmesh.learner.trainers.example_loader import ExampleLoader
from rollmesh.learner.trainers.step_batch import StepBatch, build_batch
from rollmesh.mesh.errors import DataError

log = logging.getLogger(__name__)
NAME = "reference"
"""Name of the sums among the values of an example."""
_PER_ROW = 2


class ReferencedRows:
    """Examples with the sums of their reference log-probs.

    Args:
        source: the examples.
        sums: float64 [rows, 2].
    """

    def __init__(self, source: ExampleSource, sums: NDArray[np.float64]) -> None:
        self._source = source
        self._sums = sums

    def __len__(self) -> int:
        return len(self._source)

    def examples(self, rows: Sequence[int]) -> list[Example | None]:
        """See `ExampleSource`."""
        return [
            None if example is None else Example(example.sequences, {**example.values, NAME: self._of(row, example)})
            for row, example in zip(rows, self._source.examples(rows), strict=True)
        ]

    def _of(self, row: int, example: Example) -> tuple[float, ...]:
        return tuple(self._sums[row, : len(example.sequences)].tolist())


def with_reference(
    engine: Engine,
    loader: ExampleLoader,
    source: ExampleSource,
    rows: Sequence[int],
    cache: Path,
    *,
    batch_rows: int,
    token_budget: int,
) -> ReferencedRows:
    """Examples with reference log-probs, from a file or computed now; collective.

    Args:
        engine: with the weights of the reference policy.
        loader: of examples.
        source: the examples.
        rows: those that are needed.
        cache: file, good for this source and these weights alone.
        batch_rows: rows at a time.
        token_budget: tokens per micro-batch.

    Raises:
        DataError: a row cannot be used, or a disk refuses the file.
    """
    sums = _read(engine, cache, len(source), rows)
    if sums is None:
        if engine.layout.leads:
            log.info("computes the reference log-probs of %d rows", len(rows))
        sums = torch.full((len(source), _PER_ROW), torch.nan, dtype=torch.float64)
        # Rows that are left out have a value too: they were looked at.
        sums[list(rows)] = 0.0
        starts = range(0, len(rows), batch_rows)
        ahead = loader.begin(source, rows[:batch_rows])
        for start in starts:
            chosen, examples = rows[start : start + batch_rows], loader.take(ahead)
            ahead = loader.begin(source, rows[start + batch_rows : start + 2 * batch_rows])
            found = sequence_log_probs(engine, build_batch(examples, engine, token_budget)).split(_PER_ROW)
            there = [row for row, example in zip(chosen, examples, strict=True) if example is not None]
            if there:
                sums[there] = torch.stack(found)
        loader.take(ahead)
        if engine.layout.leads:
            _write(cache, sums.numpy())
    return ReferencedRows(source, sums.numpy())


def sequence_log_probs(engine: Engine, batch: StepBatch) -> Tensor:
    """Sums of the log-probs of every sequence of a batch, float64 [S] on the CPU, in every process; collective."""
    sums = torch.zeros(batch.counts.sequences, dtype=torch.float64, device=engine.device)
    # Where results arise there is one for each micro-batch, elsewhere none.
    for output, micro, places in zip(
        engine.infer(batch.micro_batches), batch.micro_batches, batch.places, strict=False
    ):
        log_probs, row = output.policy()[0].double(), micro.row
        sums[list(places)] = segment_sum(log_probs, row.sequence_ids, row.sequence_lengths.numel())
    return engine.world.sum(sums).cpu()


def _read(engine: Engine, cache: Path, count: int, rows: Sequence[int]) -> Tensor | None:
    """The sums in a file that has all rows that are needed; rank 0's file counts."""
    sums: Tensor | None = None
    if engine.layout.leads and cache.is_file():
        try:
            found = np.load(cache, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise DataError(f"{cache} cannot be read: {error}", hint="remove it: it is computed again") from error
        if found.shape == (count, _PER_ROW) and not np.isnan(found[list(rows)]).any():
            sums = torch.from_numpy(found)
    if not engine.world.max_int(int(sums is not None)):
        return None
    own = torch.empty((count, _PER_ROW), dtype=torch.float64) if sums is None else sums
    return engine.world.broadcast(own).cpu()


def _write(cache: Path, sums: NDArray[np.float64]) -> None:
    buffer = io.BytesIO()
    np.save(buffer, sums, allow_pickle=False)
    scratch = cache.with_name(f".{cache.name}")
    try:
        scratch.write_bytes(buffer.getvalue())
        scratch.replace(cache)
    except OSError as error:
        raise DataError(f"cannot write {cache}: {error.strerror or error}", hint="free space there") from error
