"""Templates with the facts about them, and conversations in the form in which each writes all of their words.

A conversation is first written with marks in place of its words, once for each shape: roles, calls, kinds of contents.
So a message that vanishes at its place, or is written as another speaker's, is found whatever its words are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollmesh.mesh.chat.facts import TemplateFacts
from rollmesh.mesh.chat.fitting import fit, not_written
from rollmesh.mesh.chat.template import ChatTemplate, Message
from rollmesh.mesh.errors import ChatTemplateError

_ROLES = ("user", "assistant", "system", "tool")
_MOST_SHAPES = 4096


@dataclass(frozen=True, slots=True)
class AskedTemplate:
    """A template that has been asked.

    Attributes:
        template: it.
        facts: about it.
    """

    template: ChatTemplate
    facts: TemplateFacts
    _written: set[Any] = field(default_factory=set, repr=False, compare=False)

    def fit(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[dict[str, Any]]:
        """Messages in the form that the template takes, see `fit`; each of them is written.

        Args:
            messages: see `fit`.
            tools: schemas that are shown.

        Raises:
            ChatTemplateError: the template does not show the tools, leaves a message or a call out, or writes one as
                another speaker's.
        """
        if tools and not self.facts.tools:
            raise ChatTemplateError(
                "the row has tools, and the chat template does not show them",
                hint="use a model with a template for tools, or remove the field `tools`",
            )
        fitted = fit(messages, self.facts)
        shape = bool(tools), *map(_shape, fitted)
        if shape not in self._written:
            self._check(fitted, messages, tools)
            if len(self._written) < _MOST_SHAPES:
                self._written.add(shape)
        return fitted

    def _check(self, fitted: Sequence[Message], given: Sequence[Message], tools: Sequence[Any] | None) -> None:
        marked = [self._marked(message, index) for index, message in enumerate(fitted)]
        if (text := self._try(marked, tools)) is None:
            # The conversation itself has the template's own words about it.
            return
        for index, message in enumerate(fitted):
            role = str(given[index].get("role"))
            if _is_said(message) and text.count(_word(index)) != 1:
                raise self._content_error(message, index, role, text)
            calls = message.get("tool_calls") or ()
            # Results may name the call again.
            if any(_word(index, place) not in text for place in range(len(calls))):
                raise ChatTemplateError(
                    f"message {index} has {len(calls)} calls, and the chat template does not write all of them",
                    hint="make one call in each message, or use a template for several",
                )
            if role not in (*_ROLES, "developer") and f'{role}"' not in self.template.source.replace("'", '"'):
                self._refuse_another(marked, index, role, text, tools)

    def _content_error(self, message: Message, index: int, role: str, text: str) -> ChatTemplateError:
        if text.count(_word(index)) > 1:
            return ChatTemplateError(
                f"message {index} has the role {role}, and the chat template writes its words more than once",
                hint="use the template of another model",
            )
        if message.get("tool_calls"):
            return ChatTemplateError(
                f"message {index} has a content beside its calls, and the chat template does not write it",
                hint="remove that content, or use a template that writes both",
            )
        return not_written(index, role, self.facts)

    def _refuse_another(
        self, marked: Sequence[Message], index: int, role: str, text: str, tools: Sequence[Any] | None
    ) -> None:
        for known in _ROLES:
            others = [*marked[:index], {**marked[index], "role": known}, *marked[index + 1 :]]
            if self._try(others, tools) == text:
                raise ChatTemplateError(
                    f"message {index} has the role {role}, and the chat template writes it as if it were of the "
                    f"{known}",
                    hint=f"give it the role {known} if that is meant, or leave the message out",
                )

    def _marked(self, message: Message, index: int) -> dict[str, Any]:
        marked = dict(message)
        if _is_said(message):
            content, word = message["content"], _word(index)
            if isinstance(content, str):
                marked["content"] = word
            else:
                places = [place for place, part in enumerate(content) if _has_text(part)]
                marked["content"] = [
                    ({**part, "text": word} if place == places[0] else part)
                    for place, part in enumerate(content)
                    if place not in places[1:]
                ]
        if calls := message.get("tool_calls"):
            arguments: Any = {"key": "value"}
            if self.facts.arguments == "text":
                arguments = json.dumps(arguments)
            marked["tool_calls"] = [
                {**call, **_named(call, {"name": _word(index, place), "arguments": arguments})}
                for place, call in enumerate(calls)
            ]
        return marked

    def _try(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> str | None:
        try:
            return self.template.render(messages, tools=tools)
        except ChatTemplateError:
            return None


def _named(call: Mapping[str, Any], function: dict[str, Any]) -> dict[str, Any]:
    return {"function": function} if "function" in call else function


def _word(index: int, call: int | None = None) -> str:
    return f"markedword{index}end" if call is None else f"markedcall{index}number{call}end"


def _is_said(message: Message) -> bool:
    content = message.get("content")
    return any(map(_has_text, content)) if isinstance(content, list) else bool(content and str(content).strip())


def _has_text(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(text := part.get("text"), str) and bool(text.strip())


def _shape(message: Message) -> Any:
    content = message.get("content")
    kinds = tuple(_kind(part) for part in content) if isinstance(content, list) else ()
    return str(message.get("role")), _is_said(message), kinds, len(message.get("tool_calls") or ()), *sorted(message)


def _kind(part: Any) -> Any:
    return (str(part.get("type")), _has_text(part)) if isinstance(part, Mapping) else type(part).__name__
