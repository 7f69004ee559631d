"""Parts of a model's tensors, read from its folder and converted, in bounded memory.

Invariant: a reader holds one piece of `PIECE_BYTES`, and more only where a single row or expert has more. There is one
reader, but in `read_all`. Tensors that are not converted expert by expert are the exception: all that one conversion
needs is held, and its results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from time import monotonic

import torch
from torch import Tensor

from rollmesh.learner.model_files.conversion import Conversion
from rollmesh.learner.model_files.stored_model import StoredModel
from rollmesh.learner.model_files.weight_files import Part, WeightFiles, full_part, pieces
from rollmesh.mesh.errors import DataError

PIECE_BYTES = 64 << 20
"""Bytes that are read at a time; more only where a single row has more."""
# Disks and file systems of clusters answer several requests at once.
_READERS = 4


def read_rows(files: WeightFiles, source: str, part: Part) -> Iterator[tuple[Part, Tensor]]:
    """A part of a stored tensor, in pieces of its rows.

    Args:
        files: with the tensor.
        source: its name.
        part: that is wanted.

    Yields:
        The piece of the full tensor, and its values as they are stored.

    Raises:
        DataError: a file cannot be read, or has numbers that are not finite.
    """
    stored = files.stored[source]
    # Whole rows are read, also for a part of the columns.
    read, wanted = prod(stored.shape[1:]), prod(side.stop - side.start for side in part[1:])
    for piece in pieces(part, stored.itemsize, PIECE_BYTES * wanted // max(read, 1)):
        yield piece, _read_finite(files, source, piece)


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
        DataError: a file cannot be read, or has numbers that are not finite.
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


def read_all(stored: StoredModel, seconds: float) -> tuple[int, int]:
    """Reads all that a model's tensors are made of, so that what cannot be loaded is refused before anything starts.

    Args:
        stored: open.
        seconds: after which the rest is left to those who load it.

    Returns:
        The bytes that were read, and all.

    Raises:
        DataError: a file cannot be read, or has numbers that are not finite.
    """
    unused = frozenset(stored.plan.unused)
    names = [name for name in stored.files.stored if name not in unused]
    end, sizes = monotonic() + seconds, {name: stored.files.stored[name].nbytes for name in names}

    def read(name: str) -> int:
        if monotonic() > end:
            return 0
        for _ in read_rows(stored.files, name, full_part(stored.files.stored[name])):
            pass
        return sizes[name]

    with ThreadPoolExecutor(_READERS) as readers:
        return sum(readers.map(read, names)), sum(sizes.values())


def refuse_other_twins(stored: StoredModel) -> None:
    """Refuses tied tensors that are stored more than once, with several values.

    Args:
        stored: open.

    Raises:
        DataError: names two of them; a file cannot be read.
    """
    if stored.backbone_only:
        return
    state = stored.model.state_dict(keep_vars=True)
    first: dict[int, tuple[str, Conversion]] = {}
    for conversion in stored.plan.conversions:
        for name in conversion.results.keys() & state.keys():
            twin, other = first.setdefault(id(state[name]), (name, conversion))
            if twin == name:
                continue
            for part in pieces(full_part(state[name]), state[name].itemsize, PIECE_BYTES):
                own = _read_together(stored, conversion, name, part)
                if not torch.equal(own, _read_together(stored, other, twin, part)):
                    raise refuse_other_twin(stored.folder, name, twin)


def refuse_other_twin(folder: Path, name: str, twin: str) -> DataError:
    """The error for two stored tensors that should be one, and are not."""
    return DataError(
        f"model {folder} holds different values for {name} and {twin}, which its config.json ties",
        hint="set tie_word_embeddings: false in its config.json, and they are two",
    )


def _read_together(stored: StoredModel, conversion: Conversion, name: str, part: Part) -> Tensor:
    return torch.cat([values.reshape(-1).float() for *_, values in read_parts(stored, conversion, [(name, part)])])


def _convert(stored: StoredModel, conversion: Conversion, experts: slice | None = None) -> Mapping[str, Tensor]:
    shapes = stored.files.stored
    sources = conversion.of_experts(experts.start, experts.stop) if experts else conversion.sources
    read = ((source, _read_finite(stored.files, source[0], full_part(shapes[source[0]]))) for source in sources)
    return conversion.apply(stored.model, read)


def _read_finite(files: WeightFiles, source: str, part: Part) -> Tensor:
    """A part of a stored tensor, whose numbers are finite: no other command than the first that reads them finds out.

    Both ends of the values tell, at the speed of memory: NaN is both.
    """
    values = files.read(source, part)
    if values.is_floating_point() and values.numel() and not all(end.isfinite() for end in torch.aminmax(values)):
        raise DataError(
            f"model {files.folder}: {source} has numbers that are not finite (NaN or infinite)",
            hint="download or copy the folder again; if its author's is the same, it is of a training that diverged",
        )
    return values


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
