"""The reference of the algorithms as Markdown, made from registries, signatures and docstrings.

Invariant: nothing is documented twice. A summary is a docstring's first paragraph; a formula stands in the paragraphs
after it. A setting's meaning stands under `Args:` or `Attributes:`, its default in the signature. Sources are the arXiv
numbers that the docstring names. `docs/algorithms.md` holds the result between markers.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

from rollmesh.learner.algorithms import aggregation
from rollmesh.learner.algorithms.dataflows.policy_gradient import PolicyGradientSettings
from rollmesh.learner.algorithms.load import load_algorithm
from rollmesh.learner.algorithms.registry import ADVANTAGES, ALGORITHMS, POLICY_LOSSES, AdvantageTraits, LossTraits
from rollmesh.learner.algorithms.settings import Component, Settings
from rollmesh.learner.algorithms.types import Needs, UpdatePlan

_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises):$", re.MULTILINE)
_ITEM = re.compile(r"^ {4}(\w[\w, ]*):(?: (.*))?$")
_ARXIV = re.compile(r"\b(\d{4}\.\d{5})\b")
_SOURCE = re.compile(
    r"[.,]?\s*arXiv:\d{4}\.\d{5}(?:, \d{4}\.\d{5})*(?:, (?:eq|sec|alg)\. [\w. ]*\w)?(?=\.?$|[:;)])", re.MULTILINE
)
_MARKER = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end of \2 -->)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Documentation:
    """A docstring, taken apart.

    Attributes:
        summary: the first paragraph, on one line.
        prose: all paragraphs up to the first section: formulas and sources, as they stand.
        items: argument or attribute -> its meaning, on one line.
        sources: arXiv numbers, in the order in which they are named.
    """

    summary: str
    prose: str
    items: Mapping[str, str]
    sources: Sequence[str]


def read_documentation(described: object) -> Documentation:
    """Parses the docstring of a function or class; empty without one."""
    text = inspect.getdoc(described) or ""
    parts = _SECTION.split(text)
    prose = parts[0].strip()
    items: dict[str, str] = {}
    for kind, section in zip(parts[1::2], parts[2::2], strict=True):
        if kind in ("Args", "Attributes"):
            items |= _items(section)
    return Documentation(_line(prose.split("\n\n")[0]), prose, items, list(dict.fromkeys(_ARXIV.findall(text))))


def _items(section: str) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    names: list[str] = []
    for line in section.splitlines():
        if match := _ITEM.match(line):
            names = [name.strip() for name in match[1].split(",")]
            found |= {name: [match[2] or ""] for name in names}
        elif line.strip():
            for name in names:
                found[name].append(line)
    return {name: _line(" ".join(lines)) for name, lines in found.items()}


def sections() -> dict[str, str]:
    """Markdown by section: presets, advantages, losses, aggregations, settings."""
    return {
        "presets": _presets(),
        "advantages": _advantages(),
        "losses": _losses(),
        "aggregations": _text_block(inspect.cleandoc(aggregation.__doc__ or "")),
        "settings": _settings(),
    }


def fill(page: str, content: Mapping[str, str]) -> str:
    """Replaces the text between `<!-- generated: NAME -->` and `<!-- end of NAME -->`.

    Args:
        page: Markdown with markers.
        content: NAME -> Markdown.

    Raises:
        ValueError: markers and content do not name the same sections.
    """
    marked = [match[2] for match in _MARKER.finditer(page)]
    if sorted(marked) != sorted(content):
        raise ValueError(f"the page has sections {sorted(marked)}, generated are {sorted(content)}")
    return _MARKER.sub(lambda match: f"{match[1]}{content[match[2]].strip()}\n{match[3]}", page)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; bars in cells are escaped."""
    lines = [header, ["---"] * len(header), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _presets() -> str:
    def rows() -> Iterator[Sequence[str]]:
        for name in ALGORITHMS.names:
            algorithm = ALGORITHMS.get(name, "algorithm").target
            about = read_documentation(algorithm)
            expansion = _flow(algorithm.defaults) if algorithm.defaults else ""
            needs = load_algorithm(name, {}, UpdatePlan()).needs
            yield f"`{name}`", _code(expansion), _needs(needs), _without_source(about), _links(about.sources)

    return markdown_table(("name", "expands to", "needs", "what it is", "source"), rows())


def _without_source(about: Documentation) -> str:
    """A summary without the source in it: the table has a column for that."""
    return _SOURCE.sub("", about.summary)


def _needs(needs: Needs) -> str:
    roles = [
        f"{'trained' if role.trained else 'frozen'} {role.kind.replace('_', ' ')} `{role.name}`" for role in needs.roles
    ]
    parts = [
        *roles,
        *([f"groups of at least {needs.group_size}"] if needs.group_size > 1 else []),
        *(["a greedy response per group"] if needs.greedy_baseline else []),
        *([f"reward components {', '.join(needs.components)}"] if needs.components else []),
        *(["a look at the whole minibatch"] if needs.selection else []),
    ]
    return "; ".join(parts)


def _advantages() -> str:
    def needs(traits: AdvantageTraits) -> str:
        size = [f"groups of at least {traits.group_size}"] if traits.group_size > 1 else []
        return "; ".join([*(f"`{need}`" for need in traits.needs), *size])

    return _entries(ADVANTAGES, ("name", "what it is", "needs", "settings (default)", "source"), needs)


def _losses() -> str:
    def promises(traits: LossTraits) -> str:
        parts = [
            *(["skips responses without advantage"] if traits.silent_without_advantage else []),
            *([] if traits.anchored else ["no ratio"]),
            *(["picks tokens in the whole minibatch"] if traits.select is not None else []),
        ]
        return "; ".join(parts)

    return _entries(POLICY_LOSSES, ("name", "what it is", "remarks", "settings (default)", "source"), promises)


def _entries(registry: Any, header: Sequence[str], remarks: Callable[[Any], str]) -> str:
    """A table over the registry's functions, then each with its formula and the meaning of its settings."""
    rows, details = [], []
    for name in registry.names:
        entry = registry.get(name, "")
        about = read_documentation(entry.target)
        keywords = _keywords(entry.target)
        shown = ", ".join(f"`{key}` ({_value(default)})" for key, default in keywords.items())
        rows.append((f"`{name}`", about.summary, remarks(entry.traits), shown, _links(about.sources)))
        details.append(f"#### `{name}`\n")
        details.append(_text_block(about.prose))
        if keywords:
            meanings = [(f"`{key}`", _value(value), about.items.get(key, "")) for key, value in keywords.items()]
            details.append("\n" + markdown_table(("setting", "default", "meaning"), meanings))
        details.append("")
    return "\n".join([markdown_table(header, rows), "", *details])


def _keywords(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def _settings() -> str:
    """Every setting of the common dataflow; then additions and presets of the others."""
    head = ("setting", "type", "default", "meaning")
    base = dict(_fields(PolicyGradientSettings, ""))
    parts = [markdown_table(head, [(f"`{key}`", *row) for key, row in base.items()])]
    for name, kind in _nested(PolicyGradientSettings).items():
        module = inspect.getdoc(sys.modules[kind.__module__]) or ""
        parts.append(f"\n`{name}`:\n\n{_text_block(module)}")
        prose = read_documentation(kind).prose
        if "\n\n" in prose:
            parts.append(_text_block(prose))
    seen: set[type[Settings]] = {PolicyGradientSettings}
    for name in ALGORITHMS.names:
        kind = ALGORITHMS.get(name, "").target.settings_type
        if kind in seen:
            continue
        seen.add(kind)
        users = [other for other in ALGORITHMS.names if ALGORITHMS.get(other, "").target.settings_type is kind]
        rows = [(f"`{key}`", *row) for key, row in _fields(kind, "") if base.get(key) != row]
        if rows:
            parts.append(f"\nMore of {', '.join(f'`{user}`' for user in users)}:\n\n" + markdown_table(head, rows))
    return "\n".join(parts)


def _nested(kind: type[Settings]) -> dict[str, type[Settings]]:
    """Fields that hold settings of their own."""
    hints = typing.get_type_hints(kind)
    names = [item.name for item in dataclasses.fields(kind)]
    return {name: hints[name] for name in names if isinstance(hints[name], type) and issubclass(hints[name], Settings)}


def _fields(kind: type[Settings], prefix: str) -> Iterator[tuple[str, tuple[str, str, str]]]:
    """Dotted name -> type, default, meaning; nested settings in place of the field that holds them."""
    hints, nested = typing.get_type_hints(kind), _nested(kind)
    meanings: dict[str, str] = {}
    for ancestor in reversed(kind.__mro__):
        if issubclass(ancestor, Settings):
            meanings |= read_documentation(ancestor).items
    for item in dataclasses.fields(kind):
        if item.name in nested:
            yield from _fields(nested[item.name], f"{prefix}{item.name}.")
            continue
        default = item.default_factory() if item.default_factory is not dataclasses.MISSING else item.default
        yield f"{prefix}{item.name}", (_kind(hints[item.name]), _value(default), meanings.get(item.name, ""))


def _kind(hint: Any) -> str:
    if hint is Component:
        return "name, or a mapping with `name`"
    if get_origin(hint) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        inner = [_kind(option) for option in get_args(hint) if option is not type(None)]
        return " or ".join(inner) + (", optional" if type(None) in get_args(hint) else "")
    if get_origin(hint) is not None:
        return "mapping" if issubclass(get_origin(hint), Mapping) else "list"
    return {str: "text", int: "integer", float: "number", bool: "true / false"}.get(hint, "any")


def _value(value: Any) -> str:
    if value is dataclasses.MISSING or value is inspect.Parameter.empty:
        return "required"
    if value is None or value in ({}, (), []):
        return "none"
    return f"`{_flow(value)}`"


def _flow(value: Any) -> str:
    """A value as YAML in one line."""
    if isinstance(value, Component):
        return _flow({"name": value.name, **value.params}) if value.params else value.name
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _links(sources: Sequence[str]) -> str:
    return ", ".join(f"[{number}](https://arxiv.org/abs/{number})" for number in sources)


def _text_block(text: str) -> str:
    return f"```text\n{text}\n```"


def _line(text: str) -> str:
    return " ".join(text.split())
