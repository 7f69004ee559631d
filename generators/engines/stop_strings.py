"""Finding stop strings while tokens arrive.

Text is decoded incrementally: only tokens since the last complete character boundary are decoded again. The few before
them that fix how they are spelled are, too. Work per token does not grow with the response.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

# The output of decoders for bytes that do not form a character yet.
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
        self._pending: list[int] = []
        self._context_text = ""
        self._tail = ""
        # Characters before `_pending`.
        self._before = 0
        self.seen = 0

    @property
    def is_mid_character(self) -> bool:
        """True where the last tokens end within a character."""
        return bool(self._pending)

    def push(self, tokens: Sequence[int]) -> bool:
        """Adds tokens; True where they complete a stop string."""
        self._pending.extend(tokens)
        text = self._decode(self._context + self._pending)
        new = text[len(self._context_text) :]
        window = self._tail + new
        if any(stop in window for stop in self._stop):
            return True
        self.seen = self._before + len(new.rstrip(_INCOMPLETE))
        if not text.endswith(_INCOMPLETE):
            self._before = self.seen
            self._tail = window[-self._keep :] if self._keep else ""
            self._context, self._pending = self._pending, []
            self._context_text = self._decode(self._context)
        return False

    def _decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        assert isinstance(text, str)  # one sequence in, one text out
        return text
