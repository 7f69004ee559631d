"""Finds out the facts about a chat template: renders small conversations, and looks for their words in the text."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rollmesh.mesh.chat.facts import ContentForm, TemplateFacts, TurnEnd
from rollmesh.mesh.chat.template import ChatTemplate, Message, special_texts
from rollmesh.mesh.chat.thoughts import THOUGHT_FIELDS, THOUGHT_MARKS, opened_thoughts
from rollmesh.mesh.errors import ChatTemplateError

# Neither Python, JSON nor HTML writes them as they are, so that they are missed in a text where one does.
_ODD = ' "é"\n& <more> '
_USER, _ANSWER, _NEXT, _SYSTEM = (f"{word}{_ODD}end" for word in ("first", "answer", "second", "system"))
_TOOL_NAME = "probe_tool"
_RESULT, _THOUGHT, _KEY, _VALUE = "toolresult", "innerthought", "probe_key", "probevalue"
PROBED_CALL: tuple[str, dict[str, str]] = _TOOL_NAME, {_KEY: _VALUE}
"""Name and arguments of the call that `TemplateFacts.call` writes."""
_TOOL = {
    "type": "function",
    "function": {
        "name": _TOOL_NAME,
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}, "required": [_KEY]},
    },
}
_FORMS: tuple[ContentForm, ContentForm] = ("text", "parts")
# A template that chooses at random writes the same so many times with a chance of one in sixteen or less.
_SAME = 4
# Put before a template, it writes the formats of times in the places of these.
_TELLS_FORMATS = "{% macro strftime_now(format) %}[[time {{ format }}]]{% endmacro %}"
_FORMATS, _TIME_OF_DAY = re.compile(r"\[\[time (.*?)\]\]"), re.compile(r"%[-_0^#]?[HIMSfpcXTRrskl]")
# Characters of a probe: more than any template has to say.
_LONGEST = 1 << 20
_IDS = ("call_0123456789abcdef01234567", "abc123DEF")
_Forms = Mapping[str, tuple[ContentForm, ...]]
_known: dict[bytes, TemplateFacts] = {}


def facts_of(template: ChatTemplate) -> TemplateFacts:
    """The facts about a template; found out once.

    Raises:
        ChatTemplateError: it writes no conversation of a user and an assistant with all its words.
    """
    key = template.digest
    if key not in _known:
        _known[key] = _Probe(template).facts()
    return _known[key]


@dataclass(frozen=True, slots=True)
class _Probe:
    """Asks one template."""

    template: ChatTemplate

    def facts(self) -> TemplateFacts:
        forms = self._contents()
        user, answer, following = self._said(forms["user"][0], forms["assistant"][0])
        alone = self._need([user, answer])
        self._check_stable([user, answer], alone)
        followed = self._try([user, answer, following])
        prompt = self._try([user], generation_prompt=True)
        asked = self._try([user])
        added = (prompt or "").removeprefix(asked or "")
        form, nine, call = self._call(forms)
        first = self._end(alone, followed)
        end = self._with_end_of_calls(first, alone, forms, form, nine)
        call = call.rstrip()
        return TemplateFacts(
            contents=forms,
            end=end,
            begin=bool(begin := self.template.tokenizer.bos_token) and alone.startswith(str(begin)),
            marks=self._marks([user, answer]),
            prompt_is_prefix=prompt is not None and alone.startswith(prompt),
            generation_prompt=added if asked is not None and prompt == asked + added else "",
            opened_thoughts=opened_thoughts(added),
            thoughts_field=next((name for name in THOUGHT_FIELDS if self._writes_thoughts(user, answer, name)), ""),
            drops_thoughts=self._drops_thoughts(forms),
            rewrites=followed is not None and not followed.startswith(_through_end(alone, first)),
            trims=self._trims(forms),
            default_system=self._default_system(forms),
            alternates=self._try([user, following]) is None,
            tools=self._shows_tools(user),
            arguments=form,
            nine_letter_ids=nine,
            call=next((call.removesuffix(token).rstrip() for token in end.tokens if call.endswith(token)), call),
        )

    def _check_stable(self, messages: Sequence[Message], text: str) -> None:
        """Refuses a template that writes the same conversation in several ways: no prompt would begin another."""
        if any(self._try(messages) != text for _ in range(_SAME)):
            raise ChatTemplateError(
                "the chat template writes the same conversation otherwise each time",
                hint="take what is random out of the template",
            )
        if "strftime_now" not in self.template.source:
            return
        told = _Probe(replace(self.template, source=_TELLS_FORMATS + self.template.source))._try(messages)
        if told is not None and any(map(_TIME_OF_DAY.search, _FORMATS.findall(told))):
            raise ChatTemplateError(
                "the chat template writes the time of day, so that no conversation stays as it was",
                hint="let it write the date alone, as strftime_now('%Y-%m-%d')",
            )

    def _contents(self) -> dict[str, tuple[ContentForm, ...]]:
        """Forms in which contents arrive, each once; another role's is looked for within such a conversation."""
        for user, answer in itertools.product(_FORMS, repeat=2):
            if self._arrives(self._said(user, answer)[:2], _USER, _ANSWER):
                break
        else:
            # In the plainest form, for the template's own words about it.
            self._need(self._said("text", "text")[:2])
            raise ChatTemplateError(
                "the chat template writes no conversation of a user and an assistant with the words of both",
                hint="use the template of another model: this one loses texts",
            )
        said = self._said(user, answer)[:2]
        taken = {
            "user": [form for form in _FORMS if self._arrives(self._said(form, answer)[:2], _USER, _ANSWER)],
            "assistant": [form for form in _FORMS if self._arrives(self._said(user, form)[:2], _USER, _ANSWER)],
            "system": [f for f in _FORMS if self._arrives([_message("system", _SYSTEM, f), *said], _SYSTEM, _USER)],
            "developer": [form for form in _FORMS if self._takes_developer(form, said)],
        }
        forms = {role: tuple(found) for role, found in taken.items() if found}
        results = (self._tool_use(forms, form, {_KEY: _VALUE}, _IDS[1]) for form in _FORMS)
        answered = tuple(
            f for f, use in zip(_FORMS, results, strict=True) if self._arrives(use, _RESULT, tools=[_TOOL])
        )
        return forms | ({"tool": answered} if answered else {})

    def _takes_developer(self, form: ContentForm, said: Sequence[Message]) -> bool:
        if not self._arrives([_message("developer", _SYSTEM, form), *said], _SYSTEM, _USER):
            return False
        text = self._try([_message("developer", _SYSTEM, form), *said])
        return all(text != self._try([_message(role, _SYSTEM, form), *said]) for role in ("user", "assistant", "tool"))

    def _arrives(self, messages: Sequence[Message], *words: str, **how: Any) -> bool:
        """Whether a rendering has each word, once, as it is."""
        text = self._try(messages, **how)
        return text is not None and all(text.count(word) == 1 for word in words)

    def _said(self, user: ContentForm, answer: ContentForm) -> tuple[Message, Message, Message]:
        return _message("user", _USER, user), _message("assistant", _ANSWER, answer), _message("user", _NEXT, user)

    def _tool_use(self, forms: _Forms, result: ContentForm, arguments: Any, id_: str) -> list[Message]:
        call = {"id": id_, "type": "function", "function": {"name": _TOOL_NAME, "arguments": arguments}}
        return [
            _message("user", _USER, forms["user"][0]),
            {**_message("assistant", "", forms["assistant"][0]), "tool_calls": [call]},
            {**_message("tool", _RESULT, result), "name": _TOOL_NAME, "tool_call_id": id_},
        ]

    def _call(self, forms: _Forms) -> tuple[Literal["object", "text", ""], bool, str]:
        """The form of arguments, whether ids need nine letters, and a turn that is a call."""
        given: tuple[tuple[Literal["object", "text"], Any], ...] = (
            ("object", {_KEY: _VALUE}),
            ("text", json.dumps({_KEY: _VALUE})),
        )
        for (form, arguments), id_ in itertools.product(given, _IDS):
            whole = self._tool_use(forms, forms.get("tool", _FORMS)[0], arguments, id_)
            text = self._try(whole[:2], tools=[_TOOL])
            if text is None or text.count(_VALUE) != 1 or (form == "object" and not _is_read(text)):
                continue
            # With its result, as some templates look at ids only then.
            if "tool" in forms and self._try(whole, tools=[_TOOL]) is None:
                continue
            # It begins where a turn with an answer is another.
            answered = self._try(self._said(forms["user"][0], forms["assistant"][0])[:2], tools=[_TOOL]) or ""
            same = sum(
                1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text, answered, strict=False))
            )
            return form, id_ == _IDS[1], text[same:]
        return "", False, ""

    def _end(self, alone: str, followed: str | None) -> TurnEnd:
        special = special_texts(self.template.tokenizer)
        if end := _first(alone.rpartition(_ANSWER)[2], special):
            return TurnEnd((end,), "after the turn")
        if followed is not None and (end := _first(followed.partition(_ANSWER)[2].partition(_NEXT)[0], special)):
            return TurnEnd((end,), "by the next message")
        return TurnEnd((), "never")

    def _with_end_of_calls(
        self, end: TurnEnd, alone: str, forms: _Forms, form: Literal["object", "text", ""], nine: bool
    ) -> TurnEnd:
        """The end, with that of a turn that calls a tool, if it is another."""
        if not form or not end.tokens:
            return end
        arguments = {_KEY: _VALUE} if form == "object" else json.dumps({_KEY: _VALUE})
        whole = self._tool_use(forms, forms.get("tool", _FORMS)[0], arguments, _IDS[nine])
        special = special_texts(self.template.tokenizer)
        if end.written == "after the turn":
            # More than a turn's end may close a conversation.
            closing = alone.rpartition(end.tokens[0])[2]
            text = (self._try(whole[:2], tools=[_TOOL]) or "").removesuffix(closing).rstrip()
            own = next((token for token in special if text.endswith(token)), "")
        else:
            called, text = self._try(whole[:2], tools=[_TOOL]) or "", self._try(whole, tools=[_TOOL]) or ""
            own = _first(text[len(called) :].partition(_RESULT)[0], special) if text.startswith(called) else ""
        return end if not own or own in end.tokens else TurnEnd((*end.tokens, own), end.written)

    def _marks(self, messages: Sequence[Message]) -> Literal["with the end", "without the end", ""]:
        if not self.template.marks_turns:
            return ""
        text, spans = self.template.render_marked(messages)
        said = "".join(text[start:end] for start, end in spans)
        if _ANSWER not in said or _USER in said:
            return ""
        end = _first(said.rpartition(_ANSWER)[2], special_texts(self.template.tokenizer))
        return "with the end" if end else "without the end"

    def _writes_thoughts(self, user: Message, answer: Message, name: str) -> bool:
        return self._arrives([user, {**answer, name: _THOUGHT}], _THOUGHT, _ANSWER)

    def _drops_thoughts(self, forms: _Forms) -> bool:
        user, _, following = self._said(forms["user"][0], forms["assistant"][0])
        opening, closing = THOUGHT_MARKS[0]
        thinking = _message("assistant", f"{opening}\n{_THOUGHT}\n{closing}\n\n{_ANSWER}", forms["assistant"][0])
        text = self._try([user, thinking, following])
        return text is not None and _ANSWER in text and _THOUGHT not in text

    def _trims(self, forms: _Forms) -> bool:
        text = self._try(
            [_message("user", f"  {_USER}  ", forms["user"][0]), _message("assistant", _ANSWER, forms["assistant"][0])]
        )
        return text is not None and f"  {_USER}  " not in text

    def _default_system(self, forms: _Forms) -> str:
        if "system" not in forms:
            return ""
        messages = self._said(forms["user"][0], forms["assistant"][0])[:2]
        own = self._try([_message("system", _SYSTEM, forms["system"][0]), *messages])
        text = self._try(messages)
        if own is None or text is None:
            return ""
        before, _, after = own.partition(_SYSTEM)
        if not (text.startswith(before) and text.endswith(after)) or len(text) < len(before) + len(after):
            return ""
        return text[len(before) : len(text) - len(after)].strip()

    def _shows_tools(self, user: Message) -> bool:
        text = self._try([user], tools=[_TOOL], generation_prompt=True)
        return text is not None and _TOOL_NAME in text

    def _need(self, messages: Sequence[Message], **how: Any) -> str:
        text = self.template.render(messages, **how)
        if len(text) > _LONGEST:
            raise ChatTemplateError(
                f"the chat template writes {len(text)} characters for a conversation of {len(messages)} short messages",
                hint="use the template of another model",
            )
        return text

    def _try(self, messages: Sequence[Message], **how: Any) -> str | None:
        try:
            return self._need(messages, **how)
        except ChatTemplateError:
            return None


def _message(role: str, text: str, form: ContentForm) -> dict[str, Any]:
    return {"role": role, "content": text if form == "text" else [{"type": "text", "text": text}]}


def _is_read(text: str) -> bool:
    """Whether arguments are there as a structure: neither quoted again nor as Python writes them."""
    return "'" + _KEY + "'" not in text and '\\"' + _KEY not in text


def _first(text: str, special: Sequence[str]) -> str:
    """The special token that comes first in a text; empty: none."""
    found = [(at, token) for token in special if (at := text.find(token)) >= 0]
    return min(found, key=lambda one: (one[0], -len(one[1])), default=(0, ""))[1]


def _through_end(text: str, end: TurnEnd) -> str:
    """A conversation up to the end of its answer."""
    before, answer, after = text.rpartition(_ANSWER)
    if end.written != "after the turn":
        return before + answer
    return before + answer + after[: after.index(end.tokens[0]) + len(end.tokens[0])]
