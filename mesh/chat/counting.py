"""Turns of a rendered conversation by the marks that stand around them, without a rendering for each."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from rollmesh.mesh.chat.facts import TemplateFacts
from rollmesh.mesh.chat.template import Message, Span
from rollmesh.mesh.chat.thoughts import THOUGHT_MARKS, thoughts_of, thoughts_within


def counted_turns(text: str, messages: Sequence[Message], facts: TemplateFacts) -> dict[int, Span]:
    """The characters of each of the assistant's turns, up to the end of the token that ends it.

    The generation prompt stands before each turn and nowhere else, right after it the turn's content, and then an end.

    Args:
        text: the whole conversation.
        messages: as they were rendered.
        facts: about the template.

    Returns:
        By place of the message; empty where the marks do not tell. A last turn that has no end is left out.
    """
    own = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if not facts.generation_prompt or facts.rewrites or facts.drops_thoughts:
        return {}
    starts = [match.end() for match in re.finditer(re.escape(facts.generation_prompt), text)]
    if len(starts) != len(own):
        return {}
    found = {}
    for place, start, limit in zip(own, starts, [*starts[1:], len(text)], strict=True):
        if end := _end_of(text[start:limit], messages[place], facts.end.tokens):
            found[place] = start, start + end
        elif place != own[-1]:
            return {}
    return found


def _end_of(rest: str, message: Message, tokens: Sequence[str]) -> int:
    """The end of a turn with which a text begins; 0: it does not begin so."""
    content: Any = message.get("content") or ""
    if isinstance(content, list):
        # An image is none of these texts.
        content = "".join(part["text"] if part.get("type") == "text" else "\0" for part in content)
    calls = json.dumps(message.get("tool_calls") or [], ensure_ascii=False, default=str)
    if not isinstance(content, str) or any(token in calls for token in tokens):
        return 0
    thoughts = [thoughts_of(message), *thoughts_within(content)]
    answer = content.rpartition(_closing(content))[2] if any(thoughts) else content
    after = 0
    for words in (*thoughts, answer):
        at = rest.find(words.strip(), after)
        if at < 0 or _without_marks(rest[after:at]):
            return 0
        after = at + len(words.strip())
    return min((at + len(token) for token in tokens if (at := rest.find(token, after)) >= 0), default=0)


def _closing(content: str) -> str:
    return next((closing for _, closing in THOUGHT_MARKS if closing in content), "\0")


def _without_marks(text: str) -> str:
    for marks in THOUGHT_MARKS:
        for mark in marks:
            text = text.replace(mark, "")
    return text.strip()
