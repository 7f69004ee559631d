"""Every configuration key on a line of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_origin

from pydantic.fields import FieldInfo

from rollmesh.mesh.config.base import Section, section_of


def key_lines(model: type[Section], prefix: str = "") -> Iterator[str]:
    """Lines `section.key = default  -- meaning`, sections in order."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from key_lines(field.annotation, f"{prefix}{name}.")
            continue
        yield f"{prefix}{name} = {_default(field)}\n    {field.description}"
        entries = section_of(field.annotation)
        if entries is not None and (origin := get_origin(field.annotation)) in (dict, tuple):
            yield from key_lines(entries, f"{prefix}{name}.{'NAME' if origin is dict else 'N'}.")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "(required)"
    value = field.get_default(call_default_factory=True, validated_data={})
    return "none" if value is None else str(value)
