"""Token ids to text and back, with the tokenizer that came in the model bundle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mesh.errors import DataError


class TextCodec:
    """The tokenizer of a model folder.

    Raises:
        DataError: the folder has no tokenizer that can be read.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise DataError(
                f"the model bundle has no tokenizer that can be read: {error}",
                hint="the learner's model.path must hold the tokenizer's files",
            ) from error

    def decode(self, responses: Sequence[NDArray[np.int32]]) -> list[str]:
        """Texts of several responses, special tokens left out."""
        texts: list[str] = self._tokenizer.batch_decode([ids.tolist() for ids in responses], skip_special_tokens=True)
        return texts

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids
