"""Finding stop strings while tokens arrive.

Text is decoded incrementally: only tokens since the last complete character boundary, together with the few before
them that fix how they are spelled, are decoded again. Work per token does not grow with the response.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

# What decoders emit for bytes that do not form a character yet.
_INCOMPLETE = "\ufffd"


class StopMatcher:
    """Watches one response.

    Args:
        tokenizer: decodes; special tokens are skipped, as in the text that rewards see.
        stop: strings to look for, none empty.

    Attributes:
        seen: characters that have passed and are complete.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._keep = max(len(text) for text in stop) - 1
        self._context: list[int] = []
        self._fresh: list[int] = []
        self._context_text = ""
        self._tail = ""
        # Characters before `_fresh`.
        self._before = 0
        self.seen = 0

    @property
    def halfway(self) -> bool:
        """Whether the last tokens end within a character."""
        return bool(self._fresh)

    def push(self, tokens: Sequence[int]) -> bool:
        """Adds tokens; True where they complete a stop string."""
        self._fresh.extend(tokens)
        text = self._decode(self._context + self._fresh)
        new = text[len(self._context_text) :]
        window = self._tail + new
        if any(stop in window for stop in self._stop):
            return True
        self.seen = self._before + len(new.rstrip(_INCOMPLETE))
        if not text.endswith(_INCOMPLETE):
            self._before = self.seen
            self._tail = window[-self._keep :] if self._keep else ""
            self._context, self._fresh = self._fresh, []
            self._context_text = self._decode(self._context)
        return False

    def _decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        assert isinstance(text, str)  # one sequence in, one text out
        return text
