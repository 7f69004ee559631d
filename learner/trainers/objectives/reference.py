"""The reference policy's log-probs: computed once, with the initial weights, and kept for a run that continues.

Sums over a response's tokens are enough. They take 8 bytes per response, where log-probs would take 4 per token.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollmesh.learner.algorithms.ragged import segment_sum
from rollmesh.learner.data.examples import Example, ExampleSource
from rollmesh.learner.data.records import Blocks
from rollmesh.learner.engines.interface import Engine
from rollmesh.learner.trainers.example_loader import ExampleLoader, Examples
from rollmesh.learner.trainers.rows import Rows
from rollmesh.learner.trainers.step_batch import StepBatch, build_batch
from rollmesh.mesh.errors import DataError

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
class ReferencePolicy:
    """Computes log-probs with the weights of the reference policy.

    Attributes:
        engine: with these weights.
        loader: of examples.
        batch_rows: rows at a time.
        token_budget: tokens per micro-batch.
    """

    engine: Engine
    loader: ExampleLoader
    batch_rows: int
    token_budget: int

    def with_sums(self, source: ExampleSource, rows: Sequence[int], cache: Path, *, sequences: int) -> ReferencedRows:
        """Examples with reference log-probs, from a file or computed now; collective.

        Args:
            source: the examples.
            rows: those that are needed.
            cache: file, good for this source and these weights alone.
            sequences: of each example.

        Raises:
            DataError: a row cannot be used, or a disk refuses the file.
        """

        def compute() -> Tensor:
            sums = torch.full((len(source), sequences), torch.nan, dtype=torch.float64)
            # Rows that are left out have a value too: they were looked at.
            sums[list(rows)] = 0.0
            steps = [rows[start : start + self.batch_rows] for start in range(0, len(rows), self.batch_rows)]
            for chosen, examples in self._batches(source, steps):
                found = self._sums_of(examples).split(sequences)
                there = [row for row, example in zip(chosen, examples, strict=True) if example is not None]
                if there:
                    sums[there] = torch.stack(found)
            return sums

        return ReferencedRows(source, self._kept(cache, (len(source), sequences), rows, compute))

    def sums_by_step(self, rows: Rows, steps: int, change: Change, cache: Path) -> NDArray[np.float64]:
        """Reference log-probs of what a function makes of each step's examples; collective.

        Args:
            rows: of the steps.
            steps: all of them.
            change: makes one example of each.
            cache: file, good for these rows in this order, this function and these weights alone.

        Returns:
            float64 [places]: see `Rows.values`. Places of rows that are left out have 0.

        Raises:
            DataError: as `with_sums`.
        """
        chosen = [rows.of_step(step, self.batch_rows) for step in range(steps)]
        places = sum(map(len, chosen))

        def compute() -> Tensor:
            sums = torch.zeros(places, dtype=torch.float64)
            start = 0
            for _, examples in self._batches(rows.source, chosen):
                there = [start + place for place, example in enumerate(examples) if example is not None]
                if there:
                    sums[there] = self._sums_of(change([example for example in examples if example is not None]))
                start += len(examples)
            return sums

        return self._kept(cache, (places,), range(places), compute)

    def _batches(
        self, source: ExampleSource, steps: Sequence[Sequence[int]]
    ) -> Iterator[tuple[Sequence[int], Examples]]:
        """The rows of each step with their examples, which are loaded a step ahead."""
        ahead = self.loader.begin(source, steps[0]) if steps else None
        for number, chosen in enumerate(steps):
            assert ahead is not None
            examples = self.loader.take(ahead)
            if number + 1 < len(steps):
                ahead = self.loader.begin(source, steps[number + 1])
            yield chosen, examples

    def _sums_of(self, examples: Sequence[Example | None]) -> Tensor:
        return sequence_log_probs(self.engine, build_batch(examples, self.engine, self.token_budget))

    def _kept(
        self, cache: Path, shape: tuple[int, ...], needed: Sequence[int], compute: Callable[[], Tensor]
    ) -> NDArray[np.float64]:
        """The values of a file, or computed ones, which are written there."""
        sums = _read(self.engine, cache, shape, needed)
        if sums is None:
            if self.engine.layout.leads:
                log.info("computes the reference log-probs of %d rows", len(needed))
            sums = compute()
            if self.engine.layout.leads:
                _write(cache, sums.numpy())
        found: NDArray[np.float64] = sums.numpy()
        return found


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


def _read(engine: Engine, cache: Path, shape: tuple[int, ...], rows: Sequence[int]) -> Tensor | None:
    """The sums in a file that has all rows that are needed; rank 0's file counts."""
    sums: Tensor | None = None
    if engine.layout.leads and cache.is_file():
        try:
            found = np.load(cache, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise DataError(f"{cache} cannot be read: {error}", hint="remove it: it is computed again") from error
        if found.shape == shape and not np.isnan(found[list(rows)]).any():
            sums = torch.from_numpy(found)
    if not engine.world.max_int(int(sums is not None)):
        return None
    own = torch.empty(shape, dtype=torch.float64) if sums is None else sums
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
