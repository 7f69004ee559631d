"""The meaning of messages: digests that are equal where two messages say the same in other forms.

An assistant's message counts by its thoughts, its text and its tool calls. Thoughts may stand in the text, between
marks, or apart. White space at the ends of thoughts and text does not count. Nor do a name, the ids of calls, the order
of an object's keys and the form of a whole number (1 or 1.0). A result of a tool refers to a call by its place: ids may
be rewritten as long as calls and results agree. All other messages count letter by letter.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rollmesh.generators.openai_server.conversations.messages import THOUGHTS, Message, read_arguments
from rollmesh.mesh.chat.thoughts import THOUGHT_MARKS

_OPENING, _CLOSING = (frozenset(marks) for marks in zip(*THOUGHT_MARKS, strict=True))
_MARK = re.compile("|".join(map(re.escape, _OPENING | _CLOSING)))
# After this smolagents tells the calls of an answer as text: a list in Python's form.
_RETOLD = "Calling tools:"
# Longer ones are no list of calls: Python's parser takes many times their size.
_RETOLD_CHARACTERS = 1 << 16
ROOT = b""
"""The digest of a conversation without messages."""


class AnswerMeaning(NamedTuple):
    """The meaning of an assistant's message.

    Attributes:
        whole: digest of all of it.
        bare: of the same without thoughts; the same as `whole` where there are none.
    """

    whole: bytes
    bare: bytes


def answer_meaning(message: Message) -> AnswerMeaning:
    """The meaning of an assistant's message in normal form."""
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or []]
    parts = _parts(message.get("content") or "", str(message.get(THOUGHTS, "")))
    if not calls and (retold := _retold_calls(parts)):
        parts, calls = retold
    bare = [part for part in parts if not part[0]]
    whole = _digest([parts, calls])
    return AnswerMeaning(whole, whole if len(bare) == len(parts) else _digest([bare, calls]))


def message_meaning(message: Message, call_places: Mapping[str, int]) -> bytes:
    """The meaning of a message that is no answer.

    Args:
        message: in normal form.
        call_places: of the last message with calls: the place of each by its id.
    """
    if message["role"] == "assistant":
        return answer_meaning(message).whole
    place = call_places.get(str(message.get("tool_call_id")))
    return _digest(message if place is None else {**message, "tool_call_id": place})


def tools_digest(tools: Any) -> bytes:
    """The digest of a list of tools."""
    return _digest(tools)


def extended(conversation: bytes, meaning: bytes) -> bytes:
    """The digest of a conversation with one more message."""
    return hashlib.blake2b(conversation + meaning, digest_size=16).digest()


def _parts(content: str, apart: str) -> list[tuple[bool, str]]:
    """Thoughts (True) and text (False) in turn, without white space at their ends; none of them empty."""
    parts: list[tuple[bool, str]] = []
    place, thinks = 0, False
    for mark in _MARK.finditer(content):
        closes = mark[0] in _CLOSING
        # A prompt may have opened thoughts that the answer closes.
        parts.append((thinks or (closes and not parts), content[place : mark.start()].strip()))
        place, thinks = mark.end(), not closes
    parts.append((thinks, content[place:].strip()))
    parts = [part for part in parts if part[1]]
    thoughts = (True, apart.strip())
    return [thoughts, *parts] if thoughts[1] and thoughts not in parts[:1] else parts


def adds_nothing(more: str, stop: str, said: str) -> bool:
    """Whether text after an answer is a stop string, or tells once more what the answer says.

    The API leaves stop strings out, so that a client that needs one adds it, also where the model had ended without.

    Args:
        more: after the answer.
        stop: of the call.
        said: the answer.
    """
    more = more.strip().removeprefix(stop.strip())
    if not more:
        return True
    told = _told(more)
    if told is None or told[0]:
        return False
    # Text within JSON is written with escapes.
    texts = [said, *_texts(read_arguments(said))]
    return all(any(str(code).strip() in text for text in texts) for _, code in told[1])


def _texts(value: Any) -> Iterator[str]:
    """The texts within a value of JSON; none of one that is text itself."""
    left = [value]
    while left:
        last = left.pop()
        for part in last.values() if isinstance(last, dict) else last if isinstance(last, list) else ():
            if isinstance(part, str):
                yield part
            else:
                left.append(part)


def _retold_calls(parts: list[tuple[bool, str]]) -> tuple[list[tuple[bool, str]], list[list[Any]]] | None:
    """Parts without the calls that their last text tells, and these; None: it tells none."""
    told = _told(parts[-1][1]) if parts and not parts[-1][0] else None
    return None if told is None else ([*parts[:-1], *([(False, told[0])] if told[0] else [])], told[1])


def _told(text: str) -> tuple[str, list[list[Any]]] | None:
    """The text before calls that are told as text, and names and arguments of these; None: it tells none."""
    before, mark, listed = text.partition(_RETOLD)
    if not mark or len(listed) > _RETOLD_CHARACTERS or not listed.lstrip().startswith("["):
        return None
    try:
        told = ast.literal_eval(listed.strip())
        return before.strip(), [
            [str(call["function"]["name"]), read_arguments(call["function"]["arguments"])] for call in told
        ]
    except (ValueError, SyntaxError, TypeError, LookupError, RecursionError, MemoryError):
        return None


def _digest(value: Any) -> bytes:
    return hashlib.blake2b(json.dumps(_plain(value), sort_keys=True).encode(), digest_size=16).digest()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
