"""Tokens that a grammar allows next: one matcher per response.

A grammar is a text of llguidance: Lark with JSON schemas. All engines take the same one.

Invariant: a response that has ended by an end token is a sentence of the grammar. An end token is allowed exactly where
the sentence is complete.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rollmesh.mesh.errors import PayloadError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerBase

_TAG = re.compile(r"<[^<>]*>")


class TokenGrammars:
    """Makes matchers for one model.

    Args:
        tokenizer: of the model.
        vocabulary: number of the model's logits.
        end_ids: tokens that end a response.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, end_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._end_ids = sorted(end_ids)
        self._known: LLTokenizer | None = None

    def matcher(self, grammar: str, begun: Sequence[int]) -> GrammarMatcher:
        """A matcher for a response.

        Args:
            grammar: see the module.
            begun: tokens of the response that are there already.

        Raises:
            PayloadError: the grammar cannot be read.
        """
        from llguidance import LLMatcher

        if self._known is None:
            self._known = _tokenizer(self._tokenizer, self._vocabulary, self._end_ids)
        matcher = GrammarMatcher(LLMatcher(self._known, grammar, log_level=0), self._vocabulary, self._end_ids)
        matcher.check()
        for token in begun:
            matcher.push(token)
        return matcher


class GrammarMatcher:
    """Follows one response.

    Args:
        matcher: of llguidance.
        vocabulary: number of the model's logits.
        end_ids: tokens that end a response.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: int, end_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._end_ids = list(end_ids)

    def check(self) -> None:
        """Checks the grammar.

        Raises:
            PayloadError: it cannot be read.
        """
        if self._matcher.is_error():
            raise PayloadError("sampling.grammar", self._matcher.get_error().partition("\n")[0])

    def allowed(self) -> NDArray[np.bool_]:
        """The tokens that may come next, bool [vocabulary]; at least one."""
        matcher = self._matcher
        mask = np.zeros(self._vocabulary, np.bool_)
        if not matcher.is_stopped():
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            listed = np.unpackbits(bits, bitorder="little")[: self._vocabulary]
            mask[: len(listed)] = listed
        mask[self._end_ids] = matcher.is_stopped() or matcher.is_accepting()
        # A vocabulary that cannot spell the rest must not hold the response for ever.
        mask[self._end_ids] |= not mask.any()
        return mask

    def push(self, token: int) -> None:
        """Adds the token that was drawn."""
        if token not in self._end_ids:
            self._matcher.consume_token(token)


def stands_by_id(token: AddedToken) -> bool:
    """Whether a grammar names a token by its id, `<[ID]>`, and no text in it matches the token.

    llguidance takes tags such as `<think>` for special tokens, however the tokenizer declares them.
    """
    return token.special or _TAG.fullmatch(token.content) is not None


class _PlainTokens:
    """A vocabulary of tokens that are texts, for tokenizers that llguidance does not know."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, end_ids: Sequence[int]) -> None:
        special = {number for number, token in tokenizer.added_tokens_decoder.items() if stands_by_id(token)}
        self.special_token_ids = sorted(special | set(tokenizer.all_special_ids))
        self.eos_token_id = end_ids[0]
        self.bos_token_id = None
        known = min(vocabulary, len(tokenizer))
        texts = tokenizer.batch_decode([[number] for number in range(known)], skip_special_tokens=False)
        self.tokens = [text.encode() for text in texts] + [b""] * (vocabulary - known)
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


@cache
def check_known(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuses tokenizers that llguidance cannot read by itself, as an engine of its own would have it do.

    Raises:
        PayloadError: saying why.
    """
    from llguidance.hf import from_tokenizer

    try:
        from_tokenizer(tokenizer)  # type: ignore[arg-type]  # others raise
    except ValueError as error:
        raise PayloadError("sampling.grammar", f"this engine's grammars do not know the tokenizer: {error}") from error


def _tokenizer(tokenizer: PreTrainedTokenizerBase, vocabulary: int, end_ids: Sequence[int]) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper
    from llguidance.hf import from_tokenizer

    try:
        return from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=end_ids[0])  # type: ignore[arg-type]  # others raise
    except ValueError:
        plain = TokenizerWrapper(_PlainTokens(tokenizer, vocabulary, end_ids))
        return LLTokenizer(plain, n_vocab=vocabulary, eos_token=end_ids[0])
