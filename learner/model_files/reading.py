"""Parts of a model's tensors, read from its folder and converted, in bounded memory.

Invariant: one piece of `PIECE_BYTES` is held at a time, and more only where a single row or expert has more. Tensors
that are not converted expert by expert are the exception: all that one conversion needs is held, and its results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path

from torch import Tensor

from rollmesh.learner.model_files.conversion import Conversion
from rollmesh.learner.model_files.stored_model import StoredModel
from rollmesh.learner.model_files.weight_files import Part, WeightFiles, full_part, pieces
from rollmesh.mesh.errors import DataError

PIECE_BYTES = 64 << 20
"""Bytes that are read at a time; more only where a single row has more."""


def read_rows(files: WeightFiles, source: str, part: Part) -> Iterator[tuple[Part, Tensor]]:
    """A part of a stored tensor, in pieces of its rows.

    Args:
        files: with the tensor.
        source: its name.
        part: that is wanted.

    Yields:
        The piece of the full tensor, and its values as they are stored.

    Raises:
        DataError: a file cannot be read.
    """
    stored = files.stored[source]
    # Whole rows are read, also for a part of the columns.
    read, wanted = prod(stored.shape[1:]), prod(side.stop - side.start for side in part[1:])
    for piece in pieces(part, stored.itemsize, PIECE_BYTES * wanted // max(read, 1)):
        yield piece, files.read(source, piece)


def read_parts(
    stored: StoredModel, conversion: Conversion, wanted: Sequence[tuple[str, Part]]
) -> Iterator[tuple[int, Part, Tensor]]:
    """Parts of what a conversion makes, at once or in pieces of their rows.

    Args:
        stored: open.
        conversion: of its plan.
        wanted: names of results, and parts of them.

    Yields:
        The index in `wanted`, the piece in the full tensor, and its values.

    Raises:
        DataError: a file cannot be read.
    """
    if not wanted:
        return
    if conversion.converter is None:
        source = conversion.sources[0][0]
        for index, (_, part) in enumerate(wanted):
            for piece, values in read_rows(stored.files, source, part):
                yield index, piece, values
    elif conversion.is_by_expert:
        for run in _runs(conversion, [part[0] for _, part in wanted]):
            made = _convert(stored, conversion, run)
            for index, (name, part) in enumerate(wanted):
                first, last = max(part[0].start, run.start), min(part[0].stop, run.stop)
                if first < last:
                    rows = slice(first - run.start, last - run.start)
                    yield index, (slice(first, last), *part[1:]), made[name][(rows, *part[1:])]
    else:
        made = _convert(stored, conversion)
        for index, (name, part) in enumerate(wanted):
            yield index, part, made[name][part]


def refuse_other_twin(folder: Path, name: str, twin: str) -> DataError:
    """The error for two stored tensors that should be one, and are not."""
    return DataError(
        f"model {folder} holds different values for {name} and {twin}, which its config.json ties",
        hint="set tie_word_embeddings: false in its config.json, and they are two",
    )


def _convert(stored: StoredModel, conversion: Conversion, experts: slice | None = None) -> Mapping[str, Tensor]:
    shapes = stored.files.stored
    sources = conversion.of_experts(experts.start, experts.stop) if experts else conversion.sources
    return conversion.apply(stored.model, ((s, stored.files.read(s[0], full_part(shapes[s[0]]))) for s in sources))


def _runs(conversion: Conversion, wanted: Sequence[slice]) -> Iterator[slice]:
    """The experts that are wanted, in runs of neighbours that fit into a piece."""
    (result,) = conversion.results.values()
    most = max(1, PIECE_BYTES // max(1, result[0].nbytes))
    experts = sorted({expert for side in wanted for expert in range(side.start, side.stop)})
    start = 0
    for index, expert in enumerate(experts):
        if index + 1 < len(experts) and experts[index + 1] == expert + 1 and expert + 1 - experts[start] < most:
            continue
        yield slice(experts[start], expert + 1)
        start = index + 1
