"""The base of all configuration sections."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """Base of all sections: frozen, and strict about names."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


def section_of(annotation: Any) -> type[Section] | None:
    """The section that a field holds: plainly, as an option, or as the values of a mapping."""
    candidates = (annotation, *get_args(annotation))
    return next((item for item in candidates if isinstance(item, type) and issubclass(item, Section)), None)
