"""Texts of text completions, in a form in which one call's is found again in a later call's.

A text is a sequence of parts: a mark and then its characters. Chats are followed by `known_answers`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rollmesh.generators.openai_server.conversations.prefix_index import Totals, totals

# No character.
_TEXT = 1 << 32


class ConversationKey(NamedTuple):
    """A text by the number and the total of its parts (`prefix_index`)."""

    length: int
    total: int


def totals_of_text(text: str) -> Totals:
    """Totals of a text; the first part marks it as a text and is no character."""
    return totals(np.concatenate([np.array([_TEXT], np.uint64), text_symbols(text)]))


def extend_key(conversation_totals: Totals, symbols: npt.ArrayLike) -> ConversationKey:
    """The key of a conversation with more parts at its end."""
    length = len(conversation_totals) - 1
    longer = totals(symbols, length, int(conversation_totals[-1]))
    return ConversationKey(length + len(longer) - 1, int(longer[-1]))


def text_symbols(text: str) -> npt.NDArray[np.uint64]:
    """A text's characters as parts of a conversation."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)
