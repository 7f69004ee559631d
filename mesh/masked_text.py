"""Texts as token ids with a mask, exact to the token.

A text is tokenized once, as a whole. Where a token would reach across the border of a masked part, the parts are
tokenized one by one. So generators see them too, for they tokenize a prompt alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rollmesh.mesh.chat.template import Span
from rollmesh.mesh.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, eq=False)
class MaskedTokens:
    """A text as tokens.

    Attributes:
        ids: int32 [T].
        trained: bool [T], the model's own tokens.
    """

    ids: NDArray[np.int32]
    trained: NDArray[np.bool_]


def tokenize_spans(
    tokenizer: PreTrainedTokenizerBase, text: str, spans: Sequence[Span], *, special_tokens: bool
) -> MaskedTokens:
    """Tokenizes a text; tokens within spans of its characters are trained.

    Args:
        tokenizer: of the model.
        text: all of it.
        spans: ascending, not overlapping.
        special_tokens: those that the tokenizer adds at the beginning; never at the end.
    """
    cuts = sorted({border for span in spans for border in span} - {0, len(text)})
    ids, places = _whole(tokenizer, text, special_tokens=special_tokens)
    if places is None or any(start < cut < end for start, end in places for cut in cuts):
        ids, places = [], []
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            piece, _ = _whole(tokenizer, text[start:end], special_tokens=special_tokens and not start)
            ids += piece
            places += [(start, end)] * len(piece)
    inside = [any(first <= start and end <= last and start < end for first, last in spans) for start, end in places]
    return MaskedTokens(np.array(ids, dtype=np.int32), np.array(inside, dtype=bool))


def continuation(tokenizer: PreTrainedTokenizerBase, prompt: str, response: str) -> MaskedTokens:
    """A prompt and the response after it, both texts, with the end token; the response is trained.

    Args:
        tokenizer: of the model.
        prompt: empty: all of the response is trained but its first token, which nothing predicts.
        response: with or without an end token; white space after one, as templates write it, is left out.
    """
    ended = response.rstrip()
    if tokenizer.eos_token is not None and ended.endswith(str(tokenizer.eos_token)):
        response = ended
    text = prompt + response
    tokens = tokenize_spans(tokenizer, text, [(len(prompt), len(text))], special_tokens=True)
    end = tokenizer.eos_token_id
    if end is None or (len(tokens.ids) and tokens.ids[-1] == end):
        return tokens
    return MaskedTokens(np.append(tokens.ids, np.int32(end)), np.append(tokens.trained, True))


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, *, special_tokens: bool = True) -> list[int]:
    """Token ids of a text, with one begin token at most: a text that begins with it gets no second one.

    Args:
        tokenizer: of the model.
        text: all of it; an empty one has no tokens.
        special_tokens: those that the tokenizer adds.

    Raises:
        DataError: it has half of a surrogate pair, which JSON can bring.
    """
    if not text:
        return []
    _check_unicode(text)
    ids = list(tokenizer(text, add_special_tokens=special_tokens)["input_ids"])
    return ids[1:] if special_tokens and _begins_twice(tokenizer, ids) else ids


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"a text has half of a surrogate pair at character {error.start}, which is no Unicode",
            hint="correct the escapes \\ud800 to \\udfff of the row: they come in pairs",
        ) from error


def _begins_twice(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> bool:
    return len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id


def _whole(
    tokenizer: PreTrainedTokenizerBase, text: str, *, special_tokens: bool
) -> tuple[list[int], list[Span] | None]:
    """Token ids with their places in the text; no places where the tokenizer does not know them."""
    if not text:
        return [], []
    _check_unicode(text)
    fast = bool(tokenizer.is_fast)
    encoded = tokenizer(text, add_special_tokens=special_tokens, return_offsets_mapping=fast)
    ids: list[int] = list(encoded["input_ids"])
    places = [(int(start), int(end)) for start, end in encoded["offset_mapping"]] if fast else None
    if special_tokens and _begins_twice(tokenizer, ids):
        ids, places = ids[1:], places and places[1:]
    while special_tokens and ids and ids[-1] == tokenizer.eos_token_id and (places is None or places[-1] == (0, 0)):
        ids.pop()
        if places is not None:
            places.pop()
    return ids, places
