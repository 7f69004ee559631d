"""Settings of algorithms: frozen dataclasses filled from a mapping, strict about names and types.

Values from a configuration file are plain YAML. `parse` checks them against the fields' annotations, recurses into
nested settings, and reports an unknown key with the nearest name.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, Union, get_args, get_origin


class SettingsError(ValueError):
    """An algorithm's settings are wrong.

    Args:
        field: dotted path of the offending setting.
        message: the mistake.
        hint: what to do.
    """

    def __init__(self, field: str, message: str, *, hint: str = "") -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message
        self.hint = hint


@dataclass(frozen=True)
class Settings:
    """Base of all settings: frozen dataclasses; ranges are checked in `__post_init__` by raising SettingsError."""


@dataclass(frozen=True)
class Component:
    """A named part with its own settings, written `name` or `{name: ..., setting: ...}` in a configuration.

    Attributes:
        name: registered name or import path.
        params: settings of the part.
    """

    name: str
    params: Mapping[str, Any] = field(default_factory=dict)


T = TypeVar("T", bound=Settings)


def parse(settings_type: type[T], values: Mapping[str, Any], path: str = "algorithm") -> T:
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
    defaults = {item.name: item.default for item in dataclasses.fields(settings_type)}
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        if key not in defaults:
            near = difflib.get_close_matches(str(key), defaults, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(defaults)}"
            raise SettingsError(f"{path}.{key}", "unknown setting", hint=hint)
        if _takes_component(hints[key]):
            arguments[key] = None if value is None else _component(defaults[key], value, f"{path}.{key}")
        else:
            arguments[key] = convert(hints[key], value, f"{path}.{key}")
    try:
        return settings_type(**arguments)
    except SettingsError as error:
        raise SettingsError(f"{path}.{error.field}", error.message, hint=error.hint) from error


def convert(annotation: Any, value: Any, path: str) -> Any:
    """Checks a YAML value against an annotation: bool, int, float, str, Literal, optional, nested settings.

    Raises:
        SettingsError: where it does not fit.
    """
    if annotation is Any:
        return value
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
        return convert(next(option for option in options if option is not type(None)), value, path)
    if get_origin(annotation) in (dict, Mapping):
        return _mapping(get_args(annotation), value, path)
    if get_origin(annotation) in (list, tuple, Sequence):
        return _sequence(get_args(annotation)[0], value, path)
    if annotation is float and isinstance(value, int | float) and not isinstance(value, bool):
        if math.isnan(value):
            raise SettingsError(path, "expected a number, got nan")
        return float(value)
    if isinstance(annotation, type) and type(value) is annotation:
        return value
    raise SettingsError(path, f"expected {getattr(annotation, '__name__', annotation)}, got {value!r}")


def _mapping(kinds: tuple[Any, ...], value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise SettingsError(path, f"expected a mapping, got {value!r}")
    return {str(key): convert(kinds[1], item, f"{path}.{key}") for key, item in value.items()}


def _sequence(kind: Any, value: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise SettingsError(path, f"expected a list, got {value!r}")
    return tuple(convert(kind, item, f"{path}[{index}]") for index, item in enumerate(value))


def merge(defaults: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A preset with the user's settings over it, both in the form of the configuration.

    Mappings merge key by key; one that names another component than the preset's takes its place as a whole.
    """
    merged = dict(defaults)
    for key, value in values.items():
        before = merged.get(key)
        if isinstance(before, str) and isinstance(value, Mapping) and "name" not in value:
            before = {"name": before}
        if not isinstance(before, Mapping) or not isinstance(value, Mapping):
            merged[key] = value
        elif value.get("name", before.get("name")) == before.get("name"):
            merged[key] = merge(before, value)
        else:
            merged[key] = value
    return merged


def _takes_component(hint: Any) -> bool:
    return hint is Component or Component in get_args(hint)


def _component(default: Any, value: Any, path: str) -> Component:
    if isinstance(value, Component):
        return value
    if isinstance(value, str):
        return Component(value)
    if isinstance(value, Mapping):
        name = value.get("name", default.name if isinstance(default, Component) else None)
        if isinstance(name, str):
            return Component(name, {key: item for key, item in value.items() if key != "name"})
    raise SettingsError(path, f"expected a name, or a mapping with a name, got {value!r}")
