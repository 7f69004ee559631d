"""Texts that a chat template was meant for, told from those that were written with one already."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollmesh.learner.data.parts.answers import AS_CHAT
from rollmesh.mesh.chat.template import special_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROW_MISSES_TEMPLATE = f"prompt and response are texts, and the model's chat template is not used: to use it, {AS_CHAT}"
PROMPT_MISSES_TEMPLATE = (
    "the prompt is a text, and the model's chat template is not used: to use it, write the prompt as "
    '[{"role": "user", "content": ...}]'
)


class TemplateMarks:
    """The special tokens that a tokenizer's chat template may write.

    Args:
        tokenizer: with or without a template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        # A single character, as some tokenizers of characters have, marks nothing.
        marks = [text for text in special_texts(tokenizer) if len(text) > 1]
        self._marks = marks if tokenizer.chat_template else None

    def are_missing(self, prompt: str) -> bool:
        """Whether there is a template, and a text has no mark of one."""
        return self._marks is not None and not any(mark in prompt for mark in self._marks)
