"""Tokens of rows that the model has no embedding for: a padding token, or a text model's mark of an image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rollmesh.mesh.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def refuse_beyond(ids: Sequence[int] | np.ndarray, tokenizer: PreTrainedTokenizerBase, places: int | None) -> None:
    """Refuses a text with such a token: to compute it, a device would read beyond the embedding.

    Args:
        ids: of the text.
        tokenizer: names the token.
        places: rows of the model's embedding; None: not known.

    Raises:
        DataError: naming the first of the tokens.
    """
    if places is None or not len(ids) or int(np.max(ids)) < places:
        return
    token = next(int(token) for token in ids if token >= places)
    raise DataError(
        f"it holds {tokenizer.convert_ids_to_tokens(token)!r} ({token}), and the embedding of the model ends at "
        f"{places - 1}",
        hint="take it out of the row, or give the model a row for each token "
        "(transformers: model.resize_token_embeddings(len(tokenizer)))",
    )
