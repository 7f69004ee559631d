"""One row of a trainer's data, ready to train: a sequence, or two that belong together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from rollmesh.learner.batching.types import TrainSequence
from rollmesh.learner.data.chat_turns import MaskedTokens


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """A row.

    Attributes:
        sequences: one, or the chosen and the rejected one of a pair; they are computed in one micro-batch.
        values: further numbers by name, one for each sequence.
    """

    sequences: tuple[TrainSequence, ...]
    values: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


class ExampleSource(Protocol):
    """Random access to the rows of a data set as examples."""

    def __len__(self) -> int: ...

    def examples(self, rows: Sequence[int]) -> list[Example | None]:
        """Some rows, in that order; None for one that is left out.

        Raises:
            DataError: a row has not the form that the trainer needs; names it.
        """
        ...


def sequence_of(tokens: MaskedTokens) -> TrainSequence | None:
    """Tokens as a prompt, which ends where training begins, and a response; None where nothing is trained."""
    places = np.flatnonzero(tokens.trained[1:]) + 1
    if not len(places):
        return None
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
