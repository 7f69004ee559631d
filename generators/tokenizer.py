"""Token ids to text and back, with the tokenizer that came in the model bundle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rollmesh.mesh.errors import DataError

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
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise DataError(
                f"the model bundle has no tokenizer that can be read: {error}",
                hint="the learner's model.path must hold the tokenizer's files",
            ) from error
        self.end_ids = _end_ids(folder, self._tokenizer)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """As transformers gave it."""
        return self._tokenizer

    def decode(self, responses: Sequence[NDArray[np.int32]]) -> list[str]:
        """Texts of several responses, special tokens left out."""
        texts: list[str] = self._tokenizer.batch_decode([ids.tolist() for ids in responses], skip_special_tokens=True)
        return texts

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


def _end_ids(folder: Path, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The generation configuration names them; else the model's configuration; else the tokenizer."""
    declared: Any = None
    for name in ("generation_config.json", "config.json"):
        if declared is None and (folder / name).is_file():
            declared = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
    if declared is None:
        declared = tokenizer.eos_token_id
    if declared is None:
        return frozenset()
    return frozenset(declared if isinstance(declared, list) else [int(declared)])
