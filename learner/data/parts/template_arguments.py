"""Arguments of the chat template that a row brings: TRL's `chat_template_kwargs`, and verl's `enable_thinking`."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from rollmesh.learner.data.parts.json_texts import kind_of, structure
from rollmesh.learner.data.records import Record
from rollmesh.mesh.errors import DataError

FIELDS = ("chat_template_kwargs", "enable_thinking")
_KWARGS, _THINKING = FIELDS


def read_template_arguments(record: Record) -> dict[str, Any]:
    """The arguments of a row; empty without any. A null asks for nothing.

    Raises:
        DataError: they are something else, or contradict each other.
    """
    found = structure(record.get(_KWARGS), _KWARGS)
    if not isinstance(found, Mapping | None):
        raise DataError(
            f"field `{_KWARGS}` is {kind_of(found)}, expected an object",
            hint='write {"enable_thinking": false} and the like, or leave it out',
        )
    arguments = {name: value for name, value in (found or {}).items() if value is not None}
    thinking = record.get(_THINKING)
    if thinking is None:
        return arguments
    if not isinstance(thinking, bool):
        raise DataError(
            f"field `{_THINKING}` is {reprlib.repr(thinking)}, expected true or false",
            hint="write true or false, or leave it out",
        )
    if arguments.setdefault(_THINKING, thinking) != thinking:
        raise DataError(
            f"fields `{_THINKING}` and `{_KWARGS}` contradict each other",
            hint=f"keep one of them: leave {_THINKING} out",
        )
    return arguments
