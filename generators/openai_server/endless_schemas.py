"""Schemas that no value fits which ends: a grammar of one leads an answer nowhere, or on and on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote


def is_endless(document: Mapping[str, Any]) -> bool:
    """Whether a schema refers to itself in every way of fitting it.

    Args:
        document: the schema, with its definitions; references elsewhere, or to nothing, are not followed.
    """
    targets = {reference: _target(document, reference) for reference in _references(document)}
    ending: set[str] = set()
    # Each round finds references whose schemas end by those of the rounds before.
    while more := {name for name, schema in targets.items() if name not in ending and _ends(schema, targets, ending)}:
        ending |= more
    return not _ends(document, targets, ending)


def _ends(schema: Any, targets: Mapping[str, Any], ending: set[str]) -> bool:
    """Whether some value of a schema ends, as far as it is known."""
    if not isinstance(schema, Mapping):
        return True
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference in targets and reference not in ending:
        return False
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(properties, Mapping) and isinstance(required, list):
        needed = [properties.get(name) for name in required if isinstance(name, str)]
        if schema.get("type", "object") == "object" and not all(_ends(part, targets, ending) for part in needed):
            return False
    every = schema.get("allOf")
    if isinstance(every, list) and not all(_ends(part, targets, ending) for part in every):
        return False
    ways = [schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list) and schema[key]]
    return all(any(_ends(part, targets, ending) for part in way) for way in ways)


def _references(part: Any) -> Iterator[str]:
    if isinstance(part, Mapping):
        if isinstance(reference := part.get("$ref"), str) and reference.startswith("#"):
            yield reference
        part = list(part.values())
    for inner in part if isinstance(part, list) else ():
        yield from _references(inner)


def _target(document: Any, reference: str) -> Any:
    """The part of a document that a reference names; None for none."""
    for name in reference.split("/")[1:]:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(document, list) and name.isdecimal() and int(name) < len(document):
            document = document[int(name)]
        else:
            document = document.get(name) if isinstance(document, Mapping) else None
    return document
