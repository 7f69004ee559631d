"""Reading a configuration: YAML, `--a.b.c=v` overrides, and errors that name the key and the nearest name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from rollmesh.mesh.config import yaml_text
from rollmesh.mesh.config.base import FORM, Section, levels, section_of
from rollmesh.mesh.config.foreign.answers import answers, describe, without
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.placement import section_from
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.files import write_atomically

# Names that peft and papers have for keys.
_ELSEWHERE = {"r": "rank", "lora_alpha": "alpha", "use_rslora": "rank_stabilized", "k": "n", "num_generations": "n"}
# The need of a key, by the type of pydantic's error.
_NEEDS = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "a mapping, {KEY: VALUE}",
    "float_parsing": "a number",
    "float_type": "a number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "list_type": "a list in brackets, [VALUE, ...]",
    "model_type": "a section",
    "path_type": "a path",
    "string_type": "a text",
    "tuple_type": "a list in brackets, [VALUE, ...]",
}
# A bound in words, and the name of its value in pydantic's error.
_BOUNDS = {
    "greater_than": ("a number above", "gt"),
    "greater_than_equal": ("a number of at least", "ge"),
    "less_than": ("a number below", "lt"),
    "less_than_equal": ("a number of at most", "le"),
}
_OVERRIDE = re.compile(r"[A-Za-z_][\w-]*(\.[^.=\s]+)*")
AnyConfig = TypeVar("AnyConfig", bound=Section)
# A command that only scores trains nothing.
UNTRAINED = {"model": {"path": "none"}, "data": {"train": "none.jsonl"}}
_KINDS = {bool: "true or false", dict: "a mapping", float: "a number", int: "a number", list: "a list", str: "a text"}


def load_config(source: Path | Mapping[str, Any], overrides: Iterable[str] = ()) -> Config:
    """Builds the configuration of a run.

    Args:
        source: path of a YAML file, or the same as a mapping.
        overrides: `--a.b.c=value` or `a.b.c=value`; values are read as YAML.

    Raises:
        ConfigError: unreadable file, unknown key (with the nearest name), bad value, contradiction.
    """
    return load_as(Config, source, overrides)


def load_reward_config(source: Path, overrides: Iterable[str] = ()) -> Config:
    """`load_config` for what only scores: `model.path` and `data.train` may be left out.

    Raises:
        ConfigError: see `load_config`.
    """
    values = read_values(source, parse_overrides(overrides))
    for section, needed in UNTRAINED.items():
        given = values.get(section)
        if given is None or isinstance(given, Mapping):
            values[section] = {**needed, **(given or {})}
    return load_config(values)


def load_as(
    model: type[AnyConfig], source: Path | Mapping[str, Any], overrides: Iterable[str] = (), *, command: str = ""
) -> AnyConfig:
    """Builds a configuration of another command, as `load_config` does.

    Args:
        model: of the configuration.
        source: path of a YAML file, or the same as a mapping.
        overrides: see `load_config`.
        command: whose keys `rollmesh config schema COMMAND` lists; empty: those of a run.

    Raises:
        ConfigError: see `load_config`.
    """
    values = read_values(source, parse_overrides(overrides))
    if model is Config or command:
        _refuse_foreign(model, values, command)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        about_keys = any(item["type"] in ("extra_forbidden", "missing") for item in error.errors())
        listed = f"`rollmesh config schema{' ' * bool(command)}{command}` lists every key"
        raise ConfigError(_explain(error, model), hint=listed if about_keys else "") from error


def _refuse_foreign(model: type[Section], values: Mapping[str, Any], command: str) -> None:
    """Refuses keys of other projects, with ours for all of them, and with the errors of the rest.

    Raises:
        ConfigError: there are such keys.
    """
    found = answers(values, model.model_fields, "trainer" if command else "run")
    if not found:
        return
    lines = [describe(found)]
    try:
        model.model_validate(without(values, found))
    except ValidationError as error:
        lines.append(_explain(error, model))
    hint = "`rollmesh init --from FILE` writes a configuration out of one of verl or TRL"
    raise ConfigError("\n".join(lines), hint=f"docs/trainers.md has a whole file for {command}" if command else hint)


def read_values(source: Path | Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a configuration that may not be complete, unchecked.

    Args:
        source: path of a YAML file, or the same as a mapping.
        changes: values by key, `a.b.c`.

    Raises:
        ConfigError: unreadable file, or a change within what is no section.
    """
    values = _read(source) if isinstance(source, Path) else dict(source)
    for dotted, value in changes.items():
        values = _with(values, dotted.split("."), value, dotted)
    return values


def save_config(config: Section, path: Path) -> None:
    """Writes a configuration, whole or not at all, with every default spelled out.

    Raises:
        OSError: the disk refuses.
    """
    values = config.model_dump(mode="json")
    write_atomically(path, yaml_text.write(values))


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """`["--a.b=1"]` -> `{"a.b": 1}`.

    Raises:
        ConfigError: naming all items that have not the form key=value.
    """
    parsed: dict[str, Any] = {}
    wrong = []
    for item in overrides:
        key, separator, text = item.removeprefix("--").partition("=")
        if not _OVERRIDE.fullmatch(key) or not separator:
            wrong.append(_wrong_form(item))
            continue
        try:
            parsed[key] = yaml_text.parse(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"override {key}: the value is not YAML: {_problem(error)}") from None
    if wrong:
        raise ConfigError("; ".join(wrong))
    return parsed


def _wrong_form(item: str) -> str:
    """The form that an override should have, in words."""
    key, separator, text = item.removeprefix("--").lstrip("+~").partition("=")
    if item.startswith("~") and key:
        return f"override {item!r}: Hydra's ~ is not understood, {key}=null unsets an optional key"
    if item.startswith("+") and separator:
        return f"override {item!r}: Hydra's + is not needed, write {key}={text}"
    if item.startswith("--") and _OVERRIDE.fullmatch(key):
        return f"override {item!r} has no value: write {item}=VALUE or {item} VALUE"
    return f"override {item!r} has not the form --section.key=value"


def _problem(error: yaml.YAMLError) -> str:
    """The error and its place, without the text that stands there."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return type(error).__name__
    mark = error.problem_mark
    return f"{error.problem} (row {mark.line + 1}, column {mark.column + 1})" if mark else str(error.problem)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        hint = "`rollmesh init` writes one" if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"cannot read configuration {path}: {error.strerror}", hint=hint) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text: {error}") from error
    try:
        values = yaml_text.parse(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {_problem(error)}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping at the top level, got {type(values).__name__}")
    return values


def _with(values: Mapping[str, Any], path: list[str], value: Any, dotted: str) -> dict[str, Any]:
    head, *rest = path
    if not rest:
        return {**values, head: value}
    inner = values.get(head, {})
    if isinstance(inner, str) and dotted.startswith("algorithm."):
        inner = {"name": inner}  # the algorithm, or a part of it, by its name alone
    if head == "placement":
        inner = section_from(inner)
    if inner is None:
        inner = {}
    if not isinstance(inner, Mapping):
        raise ConfigError(f"override {dotted}: {head} is not a section")
    return {**values, head: _with(inner, rest, value, dotted)}


def _explain(error: ValidationError, model: type[Section]) -> str:
    """All errors of the user's own, without the values; pydantic's errors that only follow from them are left out."""
    lines = []
    for item in error.errors():
        if item["type"] == "default_factory_not_called":
            continue
        location = [str(part) for part in item["loc"] if not str(part).startswith(FORM)]
        dotted = ".".join(location) or "configuration"
        if item["type"] == "extra_forbidden":
            fields = _fields_at(model, location[:-1])
            near = [_ELSEWHERE[location[-1]]] if _ELSEWHERE.get(location[-1]) in fields else []
            near = near or difflib.get_close_matches(location[-1], fields, n=1, cutoff=0.5)
            prefix = "".join(f"{part}." for part in location[:-1])
            lines.append(f"unknown key {dotted}" + (f", did you mean {prefix}{near[0]}?" if near else ""))
        elif item["type"] == "missing":
            lines.append(f"missing key {', '.join(_required_below(model, location)) or dotted}")
        else:
            lines.append(f"{dotted}: {_wrong_value(item, model)}")
    return "; ".join(lines)


def _required_below(top: type[Section], path: list[str]) -> list[str]:
    """The keys that a missing section has to have; empty where it is no section, or needs none."""
    fields = _fields_at(top, path)
    return [".".join((*path, name)) for name, field in fields.items() if field.is_required()]


def _wrong_value(item: ErrorDetails, model: type[Section]) -> str:
    if needed := _NEEDS.get(item["type"]):
        return f"needs {needed}, not {_KINDS.get(type(item['input']), 'nothing')}"
    if item["type"] == "finite_number":
        return "needs a finite number"
    if item["type"] == "int_from_float":
        return "needs a whole number, not one with a fraction"
    if item["type"] == "literal_error":
        return f"needs {item['ctx']['expected']}{_near(item)}"
    if bound := _BOUNDS.get(item["type"]):
        words, name = bound
        return f"needs {words} {item['ctx'][name]:g}{_or_left_out(item, model)}"
    return item["msg"].removeprefix("Value error, ")


def _near(item: ErrorDetails) -> str:
    """The choice that the value is probably meant to be, in words; empty without one."""
    choices = re.findall(r"'([^']*)'", item["ctx"]["expected"])
    near = difflib.get_close_matches(str(item["input"]), choices, n=1, cutoff=0.75)
    return f", did you mean {near[0]}?" if near else ""


def _or_left_out(item: ErrorDetails, model: type[Section]) -> str:
    """The advice to leave a key out whose value is found by default, in words."""
    *path, name = map(str, item["loc"])
    field = _fields_at(model, path).get(name)
    return "; leave the key out for its default" if field is not None and field.default is None else ""


def _fields_at(top: type[Section], path: list[str]) -> Mapping[str, FieldInfo]:
    model: type[BaseModel] | None = top
    free = 0
    for part in path:
        if free:  # the name or number of an entry, as a role's: the section is that of all entries
            free -= 1
            continue
        field = model.model_fields.get(part) if model else None
        if field is None:
            return {}
        model = section_of(field.annotation)
        free = 0 if model is None else levels(field.annotation)
    return model.model_fields if model else {}
