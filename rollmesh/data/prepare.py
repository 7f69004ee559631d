"""Rows of training data, with verl's fields, from the files of a published dataset.

Invariants: the same files give the same rows, in the same order. A problem comes once, and one that is held out is
not trained on, however it is spaced or punctuated. Memory holds the keys of the problems, and never all of them.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollmesh.data.prompt_keys import normalized_key
from rollmesh.data.recipes import Problem, Recipe, UnusableRecordError
from rollmesh.data.records import records
from rollmesh.mesh.config.inputs import DataSource
from rollmesh.mesh.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

TRAIN, EVAL = "train.parquet", "eval.parquet"
# Rows of a row group: what a learner reads at once from a file that is larger than memory.
_GROUP = 1000
_DUPLICATE = "is there already"
_CONFLICT = "is there already, with another answer"
_HELD_OUT = "is held out"

Report = Callable[[str, int], None]
"""Called with the name of a file, and the rows written to it so far."""


@dataclass(frozen=True, slots=True)
class Written:
    """One file of rows.

    Attributes:
        path: where it is.
        rows: how many it has.
        left_out: records that it has not, by reason.
        examples: one record of each reason.
    """

    path: Path
    rows: int
    left_out: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)


def prepare(
    recipe: Recipe,
    training: Sequence[DataSource],
    held_out: Sequence[DataSource],
    out: Path,
    *,
    hold_out: int = 0,
    report: Report = lambda _file, _rows: None,
) -> list[Written]:
    """Writes `train.parquet`, and `eval.parquet` where something is held out.

    Args:
        recipe: of the dataset.
        training: files of training problems.
        held_out: files of held-out problems; none: some of the training problems.
        out: folder to write.
        hold_out: how many of the training problems are held out; 0 with files of held-out problems.
        report: of the progress.

    Raises:
        DataError: a file has another form, no problem is left, or the folder cannot be written.
    """
    _make(out)
    written = []
    keys = frozenset[int]()
    if held_out:
        pick = _Picker(recipe, held_out, keep=lambda _key: "")
        written.append(_write(out / EVAL, "eval", recipe, pick, report))
        keys = pick.keys
    elif hold_out:
        # By the least keys: which ones they are depends on the problems alone, and on no order.
        keys = frozenset(heapq.nsmallest(hold_out, _Picker(recipe, training, keep=lambda _key: "").all_keys()))
        pick = _Picker(recipe, training, keep=lambda key: "" if key in keys else "is not held out")
        written.append(_write(out / EVAL, "eval", recipe, pick, report))
        written[-1].left_out.clear()
    pick = _Picker(recipe, training, keep=lambda key: _HELD_OUT if key in keys else "")
    return [_write(out / TRAIN, "train", recipe, pick, report), *written]


class _Picker:
    """The problems of some files, each once, without those that are not kept."""

    def __init__(self, recipe: Recipe, sources: Sequence[DataSource], *, keep: Callable[[int], str]) -> None:
        self._recipe = recipe
        self._sources = sources
        self._keep = keep
        self._answers: dict[int, str] = {}
        self.left_out: Counter[str] = Counter()
        self.examples: dict[str, str] = {}

    @property
    def keys(self) -> frozenset[int]:
        """Keys of the problems that were given so far."""
        return frozenset(self._answers)

    def all_keys(self) -> frozenset[int]:
        for _ in self:
            pass
        return self.keys

    def __iter__(self) -> Iterator[Problem]:
        for source in self._sources:
            for origin, record in records(source):
                try:
                    problem = self._recipe.problem(record)
                except UnusableRecordError as error:
                    self._leave_out(str(error), origin)
                    continue
                key = normalized_key(problem.question, _encoded(problem))
                if reason := self._keep(key):
                    self._leave_out(reason, origin)
                elif key in self._answers:
                    self._leave_out(_DUPLICATE if self._answers[key] == problem.answer else _CONFLICT, origin)
                else:
                    self._answers[key] = problem.answer
                    yield problem

    def _leave_out(self, reason: str, origin: str) -> None:
        self.left_out[reason] += 1
        self.examples.setdefault(reason, origin)


def _encoded(problem: Problem) -> list[bytes]:
    """Images as far as a key tells them apart: the encoded ones."""
    return [image["bytes"] for image in problem.images if isinstance(image, dict) and image.get("bytes")]


def _row(recipe: Recipe, problem: Problem, split: str, index: int) -> dict[str, Any]:
    return {
        "data_source": recipe.data_source,
        "prompt": recipe.prompt(problem),
        "ability": recipe.ability,
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": {"split": split, "index": index, **problem.about},
        **({"images": list(map(_image, problem.images))} if recipe.with_images else {}),
    }


def _image(published: Any) -> Any:
    """An image as datasets store one, `{bytes, path}`."""
    if isinstance(published, dict):
        return published
    return {"bytes": published} if isinstance(published, bytes) else {"path": published}


def _schema(recipe: Recipe) -> pa.Schema:
    """The columns of a recipe's rows, known before the first: fields that only later rows have are kept too."""
    import pyarrow as pa

    def struct(*texts: str, **others: pa.DataType) -> pa.DataType:
        return pa.struct({**dict.fromkeys(texts, pa.string()), **others})

    images = {"images": pa.list_(struct(bytes=pa.binary(), path=pa.string()))} if recipe.with_images else {}
    return pa.schema(
        {
            "data_source": pa.string(),
            "prompt": pa.list_(struct("role", "content")),
            "ability": pa.string(),
            "reward_model": struct("style", "ground_truth"),
            "extra_info": struct("split", *recipe.about, index=pa.int64()),
            **images,
        }
    )


def _write(path: Path, split: str, recipe: Recipe, problems: _Picker, report: Report) -> Written:
    """Writes a file whole or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = (_row(recipe, problem, split, index) for index, problem in enumerate(problems))
    scratch, written = path.with_name(f".{path.name}"), 0
    with _writing(scratch):
        first = list(islice(rows, _GROUP))
        if not first:
            raise DataError(f"{path.name}: no problem is left; {_why(problems)}", hint=f"it needs {recipe.published}")
        schema = _schema(recipe)
        with pq.ParquetWriter(scratch, schema) as file:
            group = first
            while group:
                file.write_table(pa.Table.from_pylist(group, schema=schema))
                written += len(group)
                report(path.name, written)
                group = list(islice(rows, _GROUP))
        scratch.replace(path)
    return Written(path, written, problems.left_out, problems.examples)


def _why(problems: _Picker) -> str:
    reasons = [
        f"{count} x {reason} ({problems.examples[reason]})" for reason, count in problems.left_out.most_common(3)
    ]
    return "; ".join(reasons) or "the files have no records"


def _make(folder: Path) -> None:
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Names the path in errors of the disk, and leaves no part of a file."""
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}", hint="free space, or set --out") from error
    finally:
        if path.is_file():
            path.unlink(missing_ok=True)
