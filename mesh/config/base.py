"""The base of all configuration sections."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
DeviceName = Literal["auto", "cpu", "cuda"]
DeviceNumbers = list[Annotated[int, Field(ge=0)]]
FORM = "\0"
"""Begins the tags of a value's forms, which pydantic puts between the keys of an error's place."""
# Ten years. Clocks and locks count nanoseconds in 64 bits, and overflow at some 290.
LONGEST_S = 10 * 365 * 86400.0
# Logits over a smaller temperature overflow; vLLM draws at this one then, and SGLang greedily, without a word.
LEAST_TEMPERATURE = 0.01


def _check_temperature(temperature: float) -> float:
    if 0 < temperature < LEAST_TEMPERATURE:
        raise ValueError(f"{temperature:g} is below {LEAST_TEMPERATURE:g}; 0 is greedy")
    return temperature


Temperature = Annotated[float, Field(ge=0), AfterValidator(_check_temperature)]


def _expand_home(path: str) -> str:
    try:
        return str(Path(path).expanduser()) if path.startswith("~") else path
    except RuntimeError as error:
        raise ValueError(f"{path}: {error}") from error


# A folder or a hub id; `~` is the home of the user who starts the run.
ModelPath = Annotated[str, AfterValidator(_expand_home)]


class Section(BaseModel):
    """Base of all sections: frozen, strict about names, numbers finite, and times (`*_s`) that clocks can count.

    Errors repeat no value, which may be a misplaced secret.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, hide_input_in_errors=True, allow_inf_nan=False
    )

    @field_validator("*")
    @classmethod
    def _countable(cls, value: Any, info: ValidationInfo) -> Any:
        if info.field_name and info.field_name.endswith("_s") and isinstance(value, float) and value > LONGEST_S:
            raise ValueError(f"needs at most {LONGEST_S:.0f} seconds (ten years)")
        return value


def http_parts(url: str) -> SplitResult | None:
    """The parts of a URL of http or https that names a host; None for anything else."""
    try:
        parts = urlsplit(url)
        named = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return None
    return parts if named else None


def section_of(annotation: Any) -> type[Section] | None:
    """The section that a field holds: plainly, as an option, or as the entries of a mapping or a list."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for inner in get_args(annotation) if (found := section_of(inner)) is not None), None)


def holds_several(annotation: Any) -> bool:
    """True where a field holds entries by name or by number: those of a mapping or a list."""
    return levels(annotation) > 0


def levels(annotation: Any) -> int:
    """Mappings and lists in one another, in whose innermost a field holds its entries."""
    own = get_origin(annotation) in (dict, list, tuple)
    return own + max(map(levels, get_args(annotation)), default=0)
