"""One row as it is trained: its text in pieces, and which of them count."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens.

    Attributes:
        text: special tokens included.
        tokens: their number.
        trained: whether they count.
    """

    text: str
    tokens: int
    trained: bool


def pieces_of(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], trained: Sequence[bool]) -> list[Piece]:
    """The pieces of a sequence.

    Args:
        tokenizer: of the model.
        ids: of all tokens.
        trained: whether each counts.
    """
    found = []
    for counts, run in itertools.groupby(zip(ids, trained, strict=True), key=lambda pair: bool(pair[1])):
        piece = [token for token, _ in run]
        found.append(Piece(str(tokenizer.decode(piece, skip_special_tokens=False)), len(piece), counts))
    return found
