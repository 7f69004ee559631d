"""Words of messages, and whether a rendering has them.

A template that writes the few words of a probe may still change others. It may cut long texts, write small letters, or
leave out what looks like a command.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from rollmesh.mesh.chat.template import Message
from rollmesh.mesh.chat.thoughts import THOUGHT_MARKS
from rollmesh.mesh.errors import ChatTemplateError

_THOUGHTS_END = re.compile("|".join(re.escape(closing) for _, closing in THOUGHT_MARKS))
# Some templates read them as settings, and leave them out.
_SWITCHES = re.compile(r"/(?:no_think|think|system_override)")
# Results of tools may be written as JSON, and other roles otherwise.
_CHECKED = ("system", "developer", "user", "assistant")
_SHOWN = 60


def words_of(message: Message) -> Iterator[str]:
    """The texts of a message, thoughts left out, without white space around them; none of them empty."""
    content = message.get("content")
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            continue
        if message.get("role") == "assistant":
            # Templates write thoughts otherwise, or drop them.
            text = _THOUGHTS_END.split(text)[-1]
        yield from filter(None, map(str.strip, _SWITCHES.split(text)))


def check_words(messages: Sequence[Message], text: str) -> None:
    """Refuses a rendering that lacks words of its messages.

    Args:
        messages: a conversation, as it was given to the template.
        text: its rendering.

    Raises:
        ChatTemplateError: names the first message whose words are missing.
    """
    for index, message in enumerate(messages):
        if message.get("role") not in _CHECKED:
            continue
        for words in words_of(message):
            if words not in text:
                shown = words if len(words) <= _SHOWN else words[:_SHOWN] + " ..."
                raise ChatTemplateError(
                    f"the chat template changes the words of message {index}, or leaves them out: {shown!r}",
                    hint="use the template of another model: this one loses texts",
                )
