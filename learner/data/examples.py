"""One row of a trainer's data, ready to train: a sequence, or two that belong together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import numpy as np

from rollmesh.learner.batching.types import TrainSequence
from rollmesh.learner.data.chat_turns import ChatEncoder
from rollmesh.learner.data.parts.token_rows import refuse_beyond
from rollmesh.learner.data.parts.turn_flags import refuse_row_flags
from rollmesh.learner.data.records import Record, RowSource
from rollmesh.learner.data.row_fields import refuse_images
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.masked_text import MaskedTokens


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """A row.

    Attributes:
        sequences: one, or the chosen and the rejected one of a pair; they are computed in one micro-batch.
        values: further numbers by name, one for each sequence.
        misses_template: made of texts, though the tokenizer has a chat template, which `data.as_chat` would use.
    """

    sequences: tuple[TrainSequence, ...]
    values: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    misses_template: bool = False


class LeftOut(Enum):
    """The reason why a row is left out, in words."""

    LONG = "it is too long"
    UNTRAINED = "nothing of it is trained"


LABEL = "label"
"""Name, among the values of an example, of a single response's label: 1 of a good one, 0 of a bad one."""
ExampleSource = RowSource[Example | None]
"""Rows of a data set as examples; None for one that is left out."""


class ExampleForm(ABC):
    """The form of a source's rows, and the example that is made of one; see `records.RowForm`."""

    _chat: ChatEncoder

    def columns(self, names: Collection[str]) -> list[str]:
        return list(names)

    def check(self, path: Path, index: int, record: Record, names: Collection[str]) -> None:
        """Looks at the fields; nothing is tokenized."""
        del names
        try:
            refuse_images(record)
            refuse_row_flags(record)
            self.read(record)
        except DataError as error:
            raise self._named(path, index, record, error) from error

    def parse(self, path: Path, index: int, record: Record, names: Collection[str]) -> Example | None:
        """The example of a record; None if it is left out."""
        del names
        found = self.judge(path, index, record)
        return None if isinstance(found, LeftOut) else found

    def judge(self, path: Path, index: int, record: Record) -> Example | LeftOut:
        """The example of a record, or the reason why it is left out; arguments and errors as those of `parse`."""
        try:
            refuse_images(record)
            refuse_row_flags(record)
            found = self.encode(record)
            for sequence in found.sequences if isinstance(found, Example) else ():
                ids = np.concatenate([sequence.prompt_ids, sequence.response_ids])
                refuse_beyond(ids, self._chat.tokenizer, self._chat.places)
        except DataError as error:
            raise self._named(path, index, record, error) from error
        return found

    @abstractmethod
    def read(self, record: Record) -> object:
        """The parts of a record.

        Raises:
            DataError: a field is missing, or of another kind.
        """

    @abstractmethod
    def encode(self, record: Record) -> Example | LeftOut:
        """The example of a record, or the reason why it is left out.

        Raises:
            DataError: as `read`; it does not fit the chat template, or is too long where such rows are refused.
        """

    def advice(self, record: Record) -> str:
        """The form in words, for a record that lacks a field of it, and where such a record belongs; else empty."""
        del record
        return ""

    def _named(self, path: Path, index: int, record: Record, error: DataError) -> DataError:
        return DataError(f"{path}, row {index}: {error.message}", hint=error.hint or self.advice(record))


def sequence_of(tokens: MaskedTokens) -> TrainSequence | LeftOut:
    """Tokens as a prompt, which ends where training begins, and a response."""
    places = np.flatnonzero(tokens.trained[1:]) + 1
    if not len(places):
        return LeftOut.UNTRAINED
    first, last = int(places[0]), int(places[-1]) + 1
    return sequence_from(tokens.ids[:first], tokens.ids[first:last], tokens.trained[first:last])


def sequence_from(
    prompt: Sequence[int] | np.ndarray, response: Sequence[int] | np.ndarray, mask: Sequence[int] | np.ndarray
) -> TrainSequence:
    """A sequence of known tokens; the mask says which of the response are trained."""
    ids = np.asarray(response, dtype=np.int32)
    return TrainSequence(
        np.asarray(prompt, dtype=np.int32), ids, np.asarray(mask, dtype=np.uint8), np.zeros(len(ids), dtype=np.float32)
    )
