"""Token ids to text and back, with the tokenizer that came in the model bundle."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rollmesh.mesh.tokenizer_files import load_tokenizer
from rollmesh.mesh.trajectory.token_ends import token_ends

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenizerCodec:
    """The tokenizer of a model folder.

    Attributes:
        end_ids: tokens that end a response, as the model's files name them.

    Raises:
        DataError: the folder has no tokenizer that can be read.
    """

    def __init__(self, folder: Path) -> None:
        from rollmesh.mesh.chat.end_tokens import end_tokens
        from rollmesh.mesh.model_config import read_config

        self._tokenizer = load_tokenizer(folder)
        self.end_ids = frozenset(end_tokens(folder, read_config(folder), self._tokenizer).all)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of transformers."""
        return self._tokenizer

    def decode(self, responses: Sequence[NDArray[np.int32]]) -> list[str]:
        """Texts of several responses, special tokens left out."""
        texts: list[str] = self._tokenizer.batch_decode([ids.tolist() for ids in responses], skip_special_tokens=True)
        return texts

    def token_ends(self, ids: NDArray[np.int32], text: str) -> list[int]:
        """For each token the characters of the text up to its end; see `mesh.trajectory.token_ends`.

        Args:
            ids: int32 [T].
            text: what `decode` makes of them.
        """
        return token_ends(ids.tolist(), text, self._pieces, self._text)

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def _pieces(self, ids: Sequence[int]) -> list[str]:
        pieces = self._tokenizer.convert_ids_to_tokens(list(ids))
        return ["" if number in self._special_ids else piece or "" for number, piece in zip(ids, pieces, strict=True)]

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self._tokenizer.added_tokens_decoder.items()
        return frozenset(self._tokenizer.all_special_ids) | {number for number, token in added if token.special}

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids
