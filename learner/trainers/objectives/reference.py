"""The reference policy's log-probs: computed once, before the first step, and kept for a run that continues.

The reference policy is the model as it was loaded, without an adapter. Sums over a response's tokens are enough: they
take 8 bytes per response, where log-probs would take 4 per token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollmesh.learner.algorithms.ragged import segment_sum
from rollmesh.learner.data.examples import Example, ExampleSource
from rollmesh.learner.data.records import Blocks
from rollmesh.learner.engines.interface import Engine
from rollmesh.learner.trainers.example_loader import Examples
from rollmesh.learner.trainers.objectives.interface import Preparation, PreparationInterrupted
from rollmesh.learner.trainers.objectives.reference_file import ReferenceFile
from rollmesh.learner.trainers.rows import OrderedRows
from rollmesh.learner.trainers.step_batch import StepBatch, build_batch

log = logging.getLogger(__name__)
NAME = "reference"
"""Name of the sums among the values of an example."""
Change = Callable[[Sequence[Example]], Sequence[Example]]
"""Other examples with one sequence in place of those of a step, as many."""


class ReferencedRows:
    """Examples with the sums of their reference log-probs.

    Args:
        source: the examples.
        sums: float64 [rows, sequences of a row].
    """

    def __init__(self, source: ExampleSource, sums: NDArray[np.float64]) -> None:
        self._source = source
        self._sums = sums

    def __len__(self) -> int:
        return len(self._source)

    @property
    def blocks(self) -> Blocks | None:
        return self._source.blocks

    def rows(self, indices: Sequence[int]) -> list[Example | None]:
        """See `RowSource`."""
        return [
            None if example is None else Example(example.sequences, {**example.values, NAME: self._of(row)})
            for row, example in zip(indices, self._source.rows(indices), strict=True)
        ]

    def _of(self, row: int) -> tuple[float, ...]:
        return tuple(self._sums[row].tolist())


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows that are computed together.

    Attributes:
        rows: of the source.
        places: of their values.
    """

    rows: Sequence[int]
    places: Sequence[int]


@dataclass(frozen=True, slots=True)
class ReferencePolicy:
    """Computes log-probs with the weights of the reference policy.

    Attributes:
        parts: the engine has these weights, and perhaps an adapter, which is left out.
        batch_rows: rows at a time.
        token_budget: tokens per micro-batch.
        has_adapter: the engine has one.
    """

    parts: Preparation
    batch_rows: int
    token_budget: int
    has_adapter: bool

    def with_sums(self, source: ExampleSource, rows: Sequence[int], cache: Path, *, sequences: int) -> ReferencedRows:
        """Examples with reference log-probs, from a file or computed now; collective.

        Args:
            source: the examples.
            rows: those that are needed.
            cache: file, good for this source and these weights alone.
            sequences: of each example.

        Raises:
            DataError: a row cannot be used, or a disk refuses the file.
            PreparationInterrupted: the training is to end.
        """
        file = ReferenceFile(cache, self.parts.engine.world)
        sums = file.read((len(source), sequences))
        needed = np.asarray(rows)
        left = needed[np.isnan(sums[needed]).any(axis=1)].tolist()
        chunks = [left[start : start + self.batch_rows] for start in range(0, len(left), self.batch_rows)]
        self._fill(sums, file, source, [_Piece(chunk, chunk) for chunk in chunks])
        return ReferencedRows(source, sums)

    def sums_by_step(self, rows: OrderedRows, steps: int, change: Change, cache: Path) -> NDArray[np.float64]:
        """Reference log-probs of what a function makes of each step's examples; collective.

        Args:
            rows: of the steps.
            steps: all of them.
            change: makes one example of each.
            cache: file, good for these rows in this order, this function and these weights alone.

        Returns:
            float64 [places]: see `OrderedRows.values`. Places of rows that are left out have 0.

        Raises:
            DataError, PreparationInterrupted: as `with_sums`.
        """
        chosen = [rows.of_step(step, self.batch_rows) for step in range(steps)]
        starts = list(accumulate(map(len, chosen), initial=0))
        file = ReferenceFile(cache, self.parts.engine.world)
        sums = file.read((starts[-1],))
        pieces = [_Piece(each, range(start, start + len(each))) for start, each in zip(starts, chosen, strict=False)]
        left = [piece for piece in pieces if np.isnan(sums[piece.places]).any()]
        self._fill(sums, file, rows.source, left, change)
        return sums

    def _fill(
        self,
        sums: NDArray[np.float64],
        file: ReferenceFile,
        source: ExampleSource,
        pieces: Sequence[_Piece],
        change: Change | None = None,
    ) -> None:
        """Computes the values of some pieces."""
        if not pieces:
            return
        engine, total, done = self.parts.engine, sum(len(piece.rows) for piece in pieces), 0
        if engine.layout.leads:
            log.info("computes the reference log-probs of %d rows", total)
        for piece, examples in self._batches(source, pieces):
            if engine.world.max_int(int(engine.layout.leads and self.parts.interrupted())):
                file.write(sums)
                raise PreparationInterrupted
            # Rows that are left out have a value too: they were looked at.
            sums[piece.places] = 0.0
            kept = [example for example in examples if example is not None]
            if kept:
                there = [place for place, example in zip(piece.places, examples, strict=True) if example is not None]
                found = self._sums_of(change(kept) if change is not None else kept)
                sums[there] = found.numpy().reshape(sums[there].shape)
            done += len(piece.rows)
            file.keep(sums, done, total)
        file.write(sums)

    def _batches(self, source: ExampleSource, pieces: Sequence[_Piece]) -> Iterator[tuple[_Piece, Examples]]:
        """The pieces with their examples, which are loaded a piece ahead."""
        ahead = self.parts.loader.begin(source, pieces[0].rows)
        for number, piece in enumerate(pieces):
            examples = self.parts.loader.take(ahead)
            if number + 1 < len(pieces):
                ahead = self.parts.loader.begin(source, pieces[number + 1].rows)
            yield piece, examples

    def _sums_of(self, examples: Sequence[Example]) -> Tensor:
        batch = build_batch(examples, self.parts.engine, self.token_budget)
        return sequence_log_probs(self.parts.engine, batch, adapter=not self.has_adapter)


def sequence_log_probs(engine: Engine, batch: StepBatch, *, adapter: bool = True) -> Tensor:
    """Sums of the log-probs of every sequence of a batch, float64 [S] on the CPU, in every process; collective.

    Args:
        engine: computes them.
        batch: the sequences.
        adapter: see `Engine.infer`.
    """
    sums = torch.zeros(batch.counts.sequences, dtype=torch.float64, device=engine.device)
    # Where results arise there is one for each micro-batch, elsewhere none.
    for output, micro, places in zip(
        engine.infer(batch.micro_batches, adapter=adapter), batch.micro_batches, batch.places, strict=False
    ):
        log_probs, row = output.policy()[0].double(), micro.row
        sums[list(places)] = segment_sum(log_probs, row.sequence_ids, row.sequence_lengths.numel())
    return engine.world.sum(sums).cpu()
