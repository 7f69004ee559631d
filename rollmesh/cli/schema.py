"""Every configuration key on a line of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo


def describe(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Lines `section.key = default  -- meaning`, sections in order."""
    for name, field in model.model_fields.items():
        section = _section(field)
        if section is not None:
            yield from describe(section, f"{prefix}{name}.")
            continue
        yield f"{prefix}{name} = {_default(field)}\n    {field.description}"


def _section(field: FieldInfo) -> type[BaseModel] | None:
    candidates = [field.annotation, *get_args(field.annotation)]
    return next((item for item in candidates if isinstance(item, type) and issubclass(item, BaseModel)), None)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "(required)"
    value = field.get_default(call_default_factory=True, validated_data={})
    return "none" if value is None else str(value)
