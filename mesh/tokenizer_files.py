"""The tokenizer of a model's folder: read without network, and without running the folder's code.

transformers is imported where the first one is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rollmesh.mesh.errors import DataError
from rollmesh.mesh.files import refuse_special_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The folder's tokenizer.

    Raises:
        DataError: the folder has no tokenizer, or it cannot be read.
    """
    from transformers import AutoTokenizer

    refuse_special_files(folder)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise DataError(
            f"{folder}: the tokenizer cannot be loaded: {error}", hint="model.path must hold the tokenizer's files"
        ) from error
    return tokenizer


def load_optional_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """The folder's tokenizer; None where it has no tokenizer files, for which transformers would make one up.

    Raises:
        DataError: the files are there but cannot be read.
    """
    return load_tokenizer(folder) if any(folder.glob("tokenizer*")) else None
