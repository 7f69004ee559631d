"""Text read as a tool's JSON schema means it.

Invariants: text that cannot be read as its schema says stays text, and so does text about which it says nothing.
A value that was read can be written as JSON. Nothing here raises, whatever the schema; each part of a schema is looked
at once per value.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from rollmesh.generators.agents.python_literals import read_literal

_WORDS = {"true": True, "false": False, "null": None}
# Names that authors of schemas use for JSON's types.
_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object", "list": "array"}
_CLASSES = {float: "number", str: "string", list: "array", dict: "object"}
# Keywords that tell the type where `type` is missing.
_TELLING = {
    **dict.fromkeys(("properties", "required", "additionalProperties"), "object"),
    **dict.fromkeys(("items", "prefixItems"), "array"),
}


class ArgumentSchemas:
    """The schemas of a tool's arguments.

    Args:
        parameters: the tool's JSON schema of them; anything else says nothing.
    """

    def __init__(self, parameters: Any) -> None:
        self._document = parameters

    def read(self, name: str, text: str) -> Any:
        """An argument's value: the first reading of its text that its schema takes.

        Where the schema takes text as well, only null, lists and objects are read.

        Args:
            name: of the argument.
            text: as the model wrote it.
        """
        found = [schema for parameters in self._parts(self._document) for schema in _named(parameters, name)]
        schema = found[0] if len(found) == 1 else {"anyOf": found}
        if isinstance(schema, Mapping) and schema.get("type") == "string" and not schema.get("nullable"):
            return text
        try:
            return next((value for value in _readings(text) if self._is_meant(schema, value, text)), text)
        except RecursionError:
            return text

    def _is_meant(self, schema: Any, value: Any, text: str) -> bool:
        if not self._takes(schema, value, schema, {}):
            return False
        # A number or a truth value is a word as well: of these the text goes first.
        return value is None or isinstance(value, list | dict) or not self._takes(schema, text, schema, {})

    def _parts(self, schema: Any) -> list[Mapping[str, Any]]:
        """A schema and those that it is composed of."""
        parts: dict[int, Mapping[str, Any]] = {}
        waiting = [schema]
        while waiting:
            part = waiting.pop()
            if isinstance(part, Mapping) and id(part) not in parts:
                parts[id(part)] = part
                waiting.extend(_composed(part))
                waiting.append(self._target(part.get("$ref"), part))
        return list(parts.values())

    def _takes(self, schema: Any, value: Any, near: Any, known: dict[int, bool | None]) -> bool | None:
        """Whether a schema takes a value; None: it says nothing about it.

        Args:
            schema: any part of the document.
            value: as JSON has it.
            near: the argument's own schema, which may bring definitions.
            known: verdicts on this value by the identity of schemas; a schema within itself says nothing.
        """
        if not isinstance(schema, Mapping):
            return None
        if id(schema) not in known:
            known[id(schema)] = None
            known[id(schema)] = self._verdict(schema, value, near, known)
        return known[id(schema)]

    def _verdict(self, schema: Mapping[str, Any], value: Any, near: Any, known: dict[int, bool | None]) -> bool | None:
        if value is None and schema.get("nullable") is True:
            return True
        verdicts = [_takes_kind(schema, value)]
        if isinstance(schema.get("enum"), list):
            verdicts.append(any(_same(value, member) for member in schema["enum"]))
        if "const" in schema:
            verdicts.append(_same(value, schema["const"]))
        if "$ref" in schema:
            verdicts.append(self._takes(self._target(schema["$ref"], near), value, near, known))
        verdicts.extend(self._takes(part, value, near, known) for part in _list(schema, "allOf"))
        for key in ("anyOf", "oneOf"):
            ways = [self._takes(way, value, near, known) for way in _list(schema, key)]
            if ways:
                verdicts.append(True if True in ways else None if None in ways else False)
        return False if False in verdicts else True if True in verdicts else None

    def _target(self, reference: Any, near: Any) -> Any:
        """The part that a local reference names: of the document, else of a schema that brings its own definitions."""
        if not isinstance(reference, str) or "#" not in reference:
            return None
        names = [unquote(name).replace("~1", "/").replace("~0", "~") for name in reference.split("#")[1].split("/")[1:]]
        for place in (self._document, near):
            for name in names:
                if isinstance(place, list) and name.isdecimal() and int(name) < len(place):
                    place = place[int(name)]
                else:
                    place = place.get(name) if isinstance(place, Mapping) else None
            if place is not None:
                return place
        return None


def _named(parameters: Mapping[str, Any], name: str) -> Iterator[Any]:
    properties = parameters.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        yield properties[name]
    elif isinstance(parameters.get("additionalProperties"), Mapping):
        yield parameters["additionalProperties"]


def _composed(schema: Mapping[str, Any]) -> Iterator[Any]:
    for key in ("allOf", "anyOf", "oneOf"):
        yield from _list(schema, key)


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    parts = schema.get(key)
    return parts if isinstance(parts, list) else []


def _takes_kind(schema: Mapping[str, Any], value: Any) -> bool | None:
    given = schema.get("type")
    types = {_TYPES.get(kind.lower(), kind.lower()) for kind in _as_list(given) if isinstance(kind, str)} - {"any"}
    if types:
        return bool(types & _kinds(value))
    # Such a keyword says nothing about values of another type.
    return True if {_TELLING[key] for key in schema if key in _TELLING} & _kinds(value) else None


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _kinds(value: Any) -> set[str]:
    """JSON schema's types of a value."""
    if value is None or isinstance(value, bool):
        return {"null" if value is None else "boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    return {next(kind for known, kind in _CLASSES.items() if isinstance(value, known))}


def _same(value: Any, member: Any) -> bool:
    """Equality of JSON, where `true` is not 1."""
    return bool(value == member) and isinstance(value, bool) == isinstance(member, bool)


def _readings(text: str) -> Iterator[Any]:
    """Values that a text may stand for, none of them a string; numbers are JSON's alone."""
    with contextlib.suppress(ValueError, RecursionError):
        value = _read_json(text)
        if not isinstance(value, str):
            yield value
        if isinstance(value, float) and value.is_integer():
            yield int(value)
    with contextlib.suppress(ValueError):
        value = read_literal(text)
        if value is None or isinstance(value, bool | list | dict):
            yield value
    word = text.strip().lower()
    if word in _WORDS:
        yield _WORDS[word]


def _read_json(text: str) -> Any:
    value = json.loads(text)
    # Python reads NaN and numbers without end, which JSON cannot hold.
    json.dumps(value, allow_nan=False)
    return value
