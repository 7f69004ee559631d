"""Structures that files may hold as JSON text: tools, calls, messages and their lists.

Tables have one type per column. So conversations and schemas, which differ from row to row, are often published as
texts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rollmesh.mesh.errors import DataError

# A text may hold the text of a structure, where a row was written to JSON twice.
_DEEPEST = 3


def structure(value: Any, field: str) -> Any:
    """A structure, decoded where it is JSON text; None for a blank text.

    Args:
        value: as the row has it.
        field: its name, for errors.

    Raises:
        DataError: it is a text, and no JSON of a structure.
    """
    for _ in range(_DEEPEST):
        if not isinstance(value, str):
            return value
        if not value.strip():
            return None
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"field `{field}` is a text, and no JSON: {error}",
                hint="write the structure itself, or its JSON text",
            ) from error
    if isinstance(value, str):
        raise DataError(f"field `{field}` is a text within a text", hint="write the structure itself, or its JSON text")
    return value


def structures(value: Any, field: str) -> list[dict[str, Any]]:
    """A list of objects: each, or all of it, may be JSON text. A single object is a list of one, None an empty one.

    Raises:
        DataError: it is something else; names field and element.
    """
    found = structure(value, field)
    if found is None:
        return []
    if isinstance(found, Mapping):
        return [dict(found)]
    if not isinstance(found, list):
        raise DataError(f"field `{field}` is {type(found).__name__}, expected a list of objects")
    elements = []
    for place, element in enumerate(found):
        element = structure(element, f"{field}[{place}]")
        if not isinstance(element, Mapping):
            raise DataError(f"field `{field}[{place}]` is {kind_of(element)}, expected an object")
        elements.append(dict(element))
    return elements


def kind_of(value: Any) -> str:
    """A value's kind in words, for errors."""
    return "null" if value is None else "empty" if value in ([], "") else type(value).__name__
