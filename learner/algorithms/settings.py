"""Settings of algorithms: frozen dataclasses filled from a mapping, strict about names and types.

Values from a configuration file are plain YAML; `parse` checks them against the fields' annotations, recurses into
nested settings, and reports an unknown key with the nearest name.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin


class SettingsError(ValueError):
    """An algorithm's settings are wrong; `field` is the dotted path of the offending one."""

    def __init__(self, field: str, message: str, *, hint: str = "") -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.hint = hint


@dataclass(frozen=True)
class Settings:
    """Base of all settings: frozen dataclasses; ranges are checked in `__post_init__` by raising SettingsError."""


T = TypeVar("T", bound=Settings)


def parse(settings_type: type[T], values: Mapping[str, Any], path: str = "algorithm.params") -> T:
    """Builds settings from a mapping.

    Args:
        settings_type: the dataclass to fill.
        values: field name -> value; nested settings are mappings.
        path: prefix of field names in errors.

    Raises:
        SettingsError: unknown key, wrong type, or a value out of range.
    """
    if not isinstance(values, Mapping):
        raise SettingsError(path, f"expected a mapping, got {values!r}")
    hints = typing.get_type_hints(settings_type)
    names = [field.name for field in dataclasses.fields(settings_type)]
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
            raise SettingsError(f"{path}.{key}", "unknown setting", hint=hint)
        arguments[key] = _convert(hints[key], value, f"{path}.{key}")
    try:
        return settings_type(**arguments)
    except SettingsError as error:
        if error.field.startswith(path):
            raise
        raise SettingsError(f"{path}.{error.field}", str(error).split(": ", 1)[1], hint=error.hint) from error


def _convert(annotation: Any, value: Any, path: str) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return value if isinstance(value, annotation) else parse(annotation, value, path)
    if get_origin(annotation) is Literal:
        choices = get_args(annotation)
        if value not in choices:
            raise SettingsError(path, f"{value!r} is not one of {', '.join(map(repr, choices))}")
        return value
    if get_origin(annotation) in (Union, types.UnionType):
        options = get_args(annotation)
        if value is None and type(None) in options:
            return None
        return _convert(next(option for option in options if option is not type(None)), value, path)
    if annotation is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(annotation, type) and type(value) is annotation:
        return value
    name = getattr(annotation, "__name__", str(annotation))
    raise SettingsError(path, f"expected {name}, got {value!r}")
