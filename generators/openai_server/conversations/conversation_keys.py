"""Conversations as clients send them, in a form in which one call's is found again in a later call's.

A conversation is a sequence of parts: the tools offered and then the messages, or a mark and then the characters of a
text. Messages with the same content are equal. White space around the model's text does not count. Nor do the order of
an object's keys, and the form of a whole number (1 or 1.0).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from rollmesh.generators.openai_server.conversations.messages import Message
from rollmesh.generators.openai_server.conversations.prefix_index import Totals, totals

_TEXT = xxhash.xxh3_64_intdigest(b"a text")


class ConversationKey(NamedTuple):
    """A conversation by the number and the total of its parts (`prefix_index`)."""

    length: int
    total: int


def totals_of_messages(messages: Sequence[Message], tools: Sequence[Any]) -> Totals:
    """Totals of a chat; its tools are the first part.

    Args:
        messages: in normal form.
        tools: offered.
    """
    return totals([_digest(list(tools)), *map(message_symbol, messages)])


def totals_of_text(text: str) -> Totals:
    """Totals of a text; the first part marks it as a text and is no character."""
    return totals(np.concatenate([np.array([_TEXT], np.uint64), text_symbols(text)]))


def extend_key(conversation_totals: Totals, symbols: npt.ArrayLike) -> ConversationKey:
    """The key of a conversation with more parts at its end."""
    length = len(conversation_totals) - 1
    longer = totals(symbols, length, int(conversation_totals[-1]))
    return ConversationKey(length + len(longer) - 1, int(longer[-1]))


def message_symbol(message: Message) -> int:
    """The symbol of a message as a part of a conversation."""
    if message["role"] == "assistant":
        message = {**message, "content": message["content"].strip()}
    return _digest(message)


def text_symbols(text: str) -> npt.NDArray[np.uint64]:
    """A text's characters as parts of a conversation."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)


def _digest(value: Any) -> int:
    return xxhash.xxh3_64_intdigest(json.dumps(_plain(value), sort_keys=True).encode())


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list):
        return list(map(_plain, value))
    return int(value) if isinstance(value, float) and value.is_integer() else value
