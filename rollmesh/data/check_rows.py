"""The data of a trainer, read as its ranks would read them, with everything that is found on the way.

Rows are compared by their tokens. Nothing is started, and memory holds a digest of each row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from rollmesh.data.check import DataReport, Finding, SourceReport, known_facts, load_check_tokenizer
from rollmesh.data.reading import read_all
from rollmesh.data.shown_row import Piece, pieces_of
from rollmesh.learner.data.chat_turns import ChatEncoder
from rollmesh.learner.data.dataset import open_rows
from rollmesh.learner.data.examples import LABEL, Example, ExampleForm, LeftOut
from rollmesh.learner.data.parts.template_marks import ROW_MISSES_TEMPLATE
from rollmesh.learner.data.records import Record
from rollmesh.learner.model_files.location import context_length, embedding_rows
from rollmesh.learner.trainers.objectives.interface import Objective
from rollmesh.learner.trainers.objectives.registry import build_objective
from rollmesh.learner.written.ends import end_notices
from rollmesh.mesh.config.inputs import DataSource
from rollmesh.mesh.config.trainers.configs import TrainerConfig
from rollmesh.mesh.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_rows(config: TrainerConfig, *, examples: int) -> DataReport:
    """Reads all rows of a trainer's configuration.

    Args:
        config: of `rollmesh sft`, `rm` or `dpo`.
        examples: rows that are named for each finding.

    Raises:
        DataError: the tokenizer cannot be loaded. Everything about the data is a finding.
    """
    tokenizer = load_check_tokenizer(config.model)
    folder = Path(config.model.path)
    # A folder with a tokenizer alone is enough to look at data.
    if (folder / "config.json").is_file() and (known := context_length(folder)) is not None:
        longest = {"max_tokens": min(config.data.max_tokens, known)}
        config = config.model_copy(update={"data": config.data.model_copy(update=longest)})
    chat = ChatEncoder(tokenizer, config.data.chat_template_kwargs, embedding_rows(folder))
    objective = build_objective(config, chat)
    trained: dict[bytes, str] = {}
    held_out: dict[bytes, str] = {}
    sources = [_Source("data.train", source, objective, examples) for source in config.data.train]
    reports = [source.run(trained, {}) for source in sources]
    if what := _one_sided({label for source in sources for label in source.labels}):
        for read in sources:
            read.count_labels(what)
    for source in config.data.eval or ():
        reports += [_Source("data.eval", source, objective, examples).run(held_out, trained)]
    first = next((source.first for source in sources if source.first is not None), None)
    row = [] if first is None else _pieces(tokenizer, first, scored=objective.model_type != "language_model")
    template = known_facts(tokenizer, config.data.chat_template_kwargs)
    return DataReport("row", config.data.max_tokens, reports, template, row, end_notices(config))


def _pieces(tokenizer: PreTrainedTokenizerBase, example: Example, *, scored: bool) -> list[Piece]:
    """The first sequence of a row; `scored`: its result stands one place after the token that it is read at."""
    sequence = example.sequences[0]
    ids = [*sequence.prompt_ids.tolist(), *sequence.response_ids.tolist()]
    counts = [False] * len(sequence.prompt_ids) + (sequence.response_mask != 0).tolist()
    return pieces_of(tokenizer, ids[:-1], counts[1:]) if scored else pieces_of(tokenizer, ids, counts)


@dataclass(frozen=True, slots=True)
class _JudgingForm:
    """The form of a source's rows, with the reasons why some are left out; see `records.RowForm`."""

    form: ExampleForm

    def columns(self, names: Collection[str]) -> list[str]:
        return self.form.columns(names)

    def check(self, path: Path, index: int, record: Record, names: Collection[str]) -> None:
        self.form.check(path, index, record, names)

    def parse(self, path: Path, index: int, record: Record, names: Collection[str]) -> Example | LeftOut:
        del names
        return self.form.judge(path, index, record)


class _Source:
    """Reads one source.

    Attributes:
        first: row that is trained.
        labels: of KTO, with the number of rows that have each.
    """

    def __init__(self, key: str, source: DataSource, objective: Objective, most: int) -> None:
        self._source, self._objective, self._most = source, objective, most
        self._report = SourceReport(key, source.label)
        self.first: Example | None = None
        self.labels: Counter[float] = Counter()

    def run(self, own: dict[bytes, str], trained: dict[bytes, str]) -> SourceReport:
        """The report of the source.

        Args:
            own: rows of this side so far, by their tokens; grows.
            trained: rows that are trained on, for a held-out source.
        """
        try:
            rows = open_rows(self._source, _JudgingForm(self._objective.form(self._source)), checked=False)
        except DataError as error:
            self._add("the source cannot be used", str(error), fails=True)
            return self._report
        self._report.rows = len(rows)
        for index, example in read_all(rows):
            if isinstance(example, DataError):
                self._report.add_unusable(example, most=self._most)
                continue
            origin = f"{self._source.label}, row {index}"
            if isinstance(example, LeftOut):
                self._add(f"the row is left out: {example.value}", origin)
                continue
            self.first = self.first or example
            if example.misses_template:
                self._report.add(ROW_MISSES_TEMPLATE, origin, note=True, most=self._most)
            self.labels.update(example.values.get(LABEL, ()))
            self._report.lengths[max(map(len, example.sequences))] += 1
            self._compare(origin, example, own, trained)
        if not self._report.lengths:
            self._add("no row of the source can be used", self._source.label, fails=True)
        return self._report

    def count_labels(self, what: str) -> None:
        """Adds a finding about labels, with as many rows as have one."""
        if count := self.labels.total():
            examples = [self._report.label][: self._most]
            self._report.findings[what] = Finding(what, fails=False, count=count, examples=examples)

    def _compare(self, origin: str, example: Example, own: dict[bytes, str], trained: dict[bytes, str]) -> None:
        digests = [
            _digest(np.asarray(sequence.prompt_ids), np.asarray(sequence.response_ids))
            for sequence in example.sequences
        ]
        key = b"".join(digests)
        if key in trained:
            self._add("the row is held out, and trained on", f"{origin} is {trained[key]}")
        if key in own:
            self._add("the row is there twice", f"{origin} is {own[key]}")
        elif (turned := b"".join(reversed(digests))) in own and turned != key:
            self._add("the pair is there the other way round", f"{origin} is {own[turned]}")
        if len(digests) > 1 and digests[0] == digests[1]:
            self._add("chosen and rejected are the same", origin)
        own.setdefault(key, origin)

    def _add(self, what: str, example: str, *, fails: bool = False) -> None:
        self._report.add(what, example, fails=fails, most=self._most)


def _one_sided(labels: Collection[float]) -> str:
    """The sentence about labels of KTO that are all the same; empty for others.

    Args:
        labels: each value once.
    """
    if len(labels) != 1:
        return ""
    there, lacking = ("true", "bad") if next(iter(labels)) else ("false", "good")
    return f"all labels are {there}: KTO and its KL reference have one side only; add {lacking} responses"


def _digest(*arrays: NDArray[Any]) -> bytes:
    digest = xxhash.xxh3_128()
    for array in arrays:
        digest.update(array.tobytes())
        digest.update(b"|")
    return digest.digest()
