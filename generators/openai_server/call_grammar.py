"""Grammars under which an answer is nothing but calls of given tools, or JSON.

A grammar is a text of llguidance (Lark with JSON schemas), which every engine takes. Calls have the form that the
model's parser reads, and each tool's arguments its schema. Thoughts may come before calls, where the chat template
knows them.

Invariant: a form is used only if the parser reads a call in that form as just this call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollmesh.generators.agents.marked_calls import (
    ARGS,
    CLOSE,
    DEEP_ALL,
    DEEP_ALL_END,
    DEEP_ONE,
    DEEP_ONE_END,
    DEEP_SEP,
    OPEN,
    TOOL_CALLS,
)
from rollmesh.generators.agents.tool_calls import ParsedTurn
from rollmesh.generators.openai_server.endless_schemas import is_endless

_SPACE = "SPACE"
_SPACE_RULE = f"{_SPACE}: /[ \\n]{{0,2}}/"
# Schemas say `uniqueItems`, `format` and the like, which a grammar cannot check: the tool does.
# White space has a bound, without which a model may write nothing else. llguidance 1.7, which vLLM has, passes over
# `whitespace_pattern`.
_OPTIONS = {
    "lenient": True,
    "whitespace_flexible": False,
    "key_separator": r":[ \n]{0,2}",
    "item_separator": r",[ \n]{0,2}",
}
_DEFINITIONS = ("$defs", "definitions")
# Beside these a schema's own properties are not all there are.
_COMBINED = {"allOf", "anyOf", "oneOf", "$ref", "if", "patternProperties", "unevaluatedProperties"}
# Quotes, tags and rows in a name would be read as marks around it.
_NAME = re.compile(r"[\w.:/@-]+(?: [\w.:/@-]+)*")
_PROBE = ("f", {"a": "x"})


@dataclass(frozen=True, slots=True)
class CallForm:
    """A form of calls.

    Attributes:
        before, between, after: marks around all calls, and between two.
        begin: of a call, up to its name.
        middle: between name and arguments.
        end: after the arguments.
        traces: texts in a chat template that tell it from similar forms.
        tagged: arguments stand between tags, one by one; else they are a JSON object.
        marks: texts in it that may be single special tokens.
        exact: the parser needs the white space as it is; else there may be more or less.
    """

    begin: str
    middle: str
    end: str
    before: str = ""
    between: str = ""
    after: str = ""
    traces: tuple[str, ...] = ()
    tagged: bool = False
    marks: tuple[str, ...] = ()
    exact: bool = False

    def example(self, name: str, arguments: Mapping[str, str]) -> str:
        """A call as text."""
        told = _tagged_example(arguments) if self.tagged else json.dumps(arguments)
        return f"{self.before}{self.begin}{name}{self.middle}{told}{self.end}{self.after}"


def _tagged_example(arguments: Mapping[str, str]) -> str:
    return "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in arguments.items())


_DEEP = (DEEP_ONE, DEEP_SEP, DEEP_ONE_END, DEEP_ALL, DEEP_ALL_END)
_TAGS = (OPEN, CLOSE)
FORMS = (
    CallForm(
        f"{OPEN}\n<function=", ">\n", f"</function>\n{CLOSE}", between="\n", tagged=True, marks=_TAGS,
        traces=("<function=",),
    ),
    CallForm(
        f'{OPEN}\n{{"name": "', '", "arguments": ', f"}}\n{CLOSE}", between="\n", marks=_TAGS,
    ),
    CallForm(TOOL_CALLS, ARGS, "", marks=(TOOL_CALLS, ARGS), traces=(ARGS,)),
    CallForm(
        '{"name": "', '", "arguments": ', "}", before=f"{TOOL_CALLS}[", between=", ", after="]", marks=(TOOL_CALLS,),
    ),
    CallForm(
        f"{DEEP_ONE}function{DEEP_SEP}", "\n```json\n", f"\n```{DEEP_ONE_END}",
        before=DEEP_ALL, between="\n", after=DEEP_ALL_END, marks=_DEEP, traces=("```json",), exact=True,
    ),
    CallForm(DEEP_ONE, DEEP_SEP, DEEP_ONE_END, before=DEEP_ALL, after=DEEP_ALL_END, marks=_DEEP),
    CallForm('{"name": "', '", "parameters": ', "}", between="; "),
)  # fmt: skip
"""Known forms: those with traces before similar ones without."""


def find_form(parse: Callable[[str], ParsedTurn], template: str) -> CallForm | None:
    """The form of calls in which a model writes; None: its parser reads none of the known ones.

    Args:
        parse: the parser.
        template: the chat template's text.
    """
    for form in FORMS:
        if not all(trace in template for trace in form.traces):
            continue
        parsed = parse(form.example(*_PROBE))
        if not parsed.content and [(call.name, call.arguments) for call in parsed.valid] == [_PROBE]:
            return form
    return None


def tools_fault(tools: Sequence[Mapping[str, Any]]) -> str:
    """The reason why no answer could call one of some tools; empty for none."""
    for tool in tools:
        function = tool["function"]
        if not _NAME.fullmatch(function["name"]):
            return f"the name {function['name'][:64]!r} is more than letters, digits and hyphens"
        if is_endless(function.get("parameters") or {}):
            return f"that of {function['name']!r} refers to itself, and no value of it ends"
    return ""


def answer_fault(schema: Mapping[str, Any]) -> str:
    """The reason why no answer could have a schema; empty for none."""
    return "it refers to itself, and no value of it ends" if is_endless(schema) else ""


def call_grammar(
    form: CallForm,
    tools: Sequence[Mapping[str, Any]],
    special: Callable[[str], int | None],
    *,
    many: bool,
    thoughts: tuple[str, str] | None = None,
    opened: bool = False,
    schema: Mapping[str, Any] | None = None,
) -> str:
    """The grammar of an answer that calls tools.

    Args:
        form: of calls.
        tools: one of them, or several, are called.
        special: the id of a text that is one special token; None for any other text.
        many: several calls are allowed.
        thoughts: marks of thoughts that may come before; None: none may.
        opened: the prompt has opened them.
        schema: the answer may be JSON of this schema instead, without thoughts; None: it may not.
    """
    rules = [_SPACE_RULE]
    names = []
    for index, tool in enumerate(tools):
        function = tool["function"]
        # Without a type a schema takes anything, and without parameters a tool takes none.
        taken = {"type": "object", **(function.get("parameters") or {"properties": {}})}
        rules.append(f"call_{index}: {_call(form, function['name'], f'arguments_{index}', special)}")
        names.append(f"call_{index}")
        rules += _tagged(taken, f"arguments_{index}") if form.tagged else [f"arguments_{index}: {_json(taken)}"]
    one = f"({' | '.join(names)})"
    more = f" ({_literals(form.between, form, special)} {one})*" if many else ""
    around = [_literals(form.before, form, special), f"{one}{more}", _literals(form.after, form, special)]
    start = " ".join(filter(None, around))
    if thoughts is None:
        # Where there is but one way to begin, llguidance allows only the token that its tokenizer would begin with.
        start = f"{_SPACE} {start}"
    else:
        opening, closing = (special(mark) for mark in thoughts)
        begin = _quoted(thoughts[0]) if opening is None else f"<[{opening}]>"
        end = "" if closing is None else f" <[{closing}]>"
        rules.append(f"thoughts[lazy]: /(.|\\n)*{_regex(thoughts[1])}/" if closing is None else "thoughts: /(.|\\n)*/")
        told = f"thoughts{end} {_SPACE}"
        start = f"{told} {start}" if opened else f"({begin} {told})? {start}"
    if schema is not None:
        start = f"({start}) | ({_SPACE} answer)"
        rules.append(f"answer: {_json(schema)}")
    return "\n".join([f"start: {start}", *rules])


def json_grammar(schema: Mapping[str, Any]) -> str:
    """The grammar of an answer that is JSON of a schema."""
    return f"start: {_SPACE} answer\n{_SPACE_RULE}\nanswer: {_json(schema)}"


def _call(form: CallForm, name: str, arguments: str, special: Callable[[str], int | None]) -> str:
    begin, middle, end = (_literals(text, form, special) for text in (form.begin, form.middle, form.end))
    return " ".join(filter(None, (begin, _quoted(name), middle, arguments, end)))


def _literals(text: str, form: CallForm, special: Callable[[str], int | None]) -> str:
    """A text as terminals: white space may be more or less, and special tokens stand by their ids."""
    found: list[str] = []
    while text:
        mark = next((mark for mark in form.marks if text.startswith(mark)), "")
        number = special(mark) if mark else None
        if number is not None:
            found.append(f"<[{number}]>")
            text = text[len(mark) :]
            continue
        piece = text[: len(text) - len(text.lstrip(" \n"))]
        if piece and not form.exact:
            found.append(_SPACE)
            text = text[len(piece) :]
            continue
        length = next(
            (
                index
                for index in range(1, len(text))
                if (text[index] in " \n" and not form.exact) or text.startswith(form.marks, index)
            ),
            len(text),
        )
        found.append(_quoted(text[:length]))
        text = text[length:]
    return " ".join(found)


def _tagged(schema: Mapping[str, Any], rule: str) -> list[str]:
    """Rules for arguments between tags, in the order of the schema: texts as they are, all else as JSON."""
    properties = schema.get("properties") or {}
    required = schema.get("required") or []
    rules, parts = [], []
    for index, (name, property_schema) in enumerate(properties.items()):
        value = f"{rule}_{index}"
        begin, end = f"<parameter={name}>\n", "\n</parameter>\n"
        choices = property_schema.get("enum") if isinstance(property_schema, Mapping) else None
        if choices and all(isinstance(choice, str) for choice in choices):
            rules.append(f"{value}: {_quoted(begin)} ({' | '.join(map(_quoted, choices))}) {_quoted(end)}")
        elif isinstance(property_schema, Mapping) and property_schema.get("type", "string") != "string":
            inner = {**{key: schema[key] for key in _DEFINITIONS if key in schema}, **property_schema}
            rules.append(f"{value}: {_quoted(begin)} {value}_json {_quoted(end)}")
            rules.append(f"{value}_json: {_json(inner)}")
        else:
            rules.append(f"{value}: {_quoted(begin)} {value}_text")
            rules.append(f"{value}_text[lazy]: /(.|\\n)*{_regex(end)}/")
        parts.append(value if name in required else f"{value}?")
    return [f"{rule}: {' '.join(parts) or _quoted('')}", *rules]


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**_closed(schema), 'x-guidance': _OPTIONS})}"


def _closed(schema: Any) -> Any:
    """A schema whose objects have only the properties that it lists, unless it says otherwise."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    # The parts of `allOf` list properties of one object.
    found = {name: part if name == "allOf" else _closed(part) for name, part in schema.items()}
    lists = isinstance(schema.get("properties"), Mapping) and not schema.keys() & _COMBINED
    return {"additionalProperties": False, **found} if lists else found


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _regex(text: str) -> str:
    """A text as a part of a regular expression between slashes."""
    escaped = "".join(f"\\{character}" if character in r"\/.^$*+?()[]{}|" else character for character in text)
    return escaped.replace("\n", "\\n")
