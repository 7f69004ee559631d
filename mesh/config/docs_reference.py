"""The configuration reference as Markdown, generated from the models (`docs/configuration.md`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rollmesh.mesh.config.base import Section, holds_several, section_of
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.trainers.configs import CONFIGS

_HEAD = """# Configuration

Generated from the models in `mesh/config/models.py` (`make docs`). One YAML file; every key can
be given on the command line as `--section.key=value`, or [by an environment variable](nodes.md#settings).
Unknown keys are refused with the nearest name.
`rollmesh config show FILE` prints the whole configuration, `rollmesh config explain FILE` the values derived from it
and all settings of the algorithm.
"""
_TABLE_HEAD = ["| key | type | default | meaning |", "|---|---|---|---|"]


def reference() -> str:
    """The whole reference."""
    lines = [_HEAD]
    for name, field in Config.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section):
            lines += [
                f"## {name}",
                "",
                field.description or "",
                "",
                *_TABLE_HEAD,
            ]
            lines += [f"| `{key}` | {kind} | {default} | {text} |" for key, kind, default, text in keys_of(section, "")]
            lines.append("")
    return "\n".join([*lines, *_trainers()])


def _trainers() -> Iterator[str]:
    """The keys of the trainers that a run does not have, or has with another type, default or meaning."""
    known = set(keys_of(Config, ""))
    for command, config in CONFIGS.items():
        yield from (f"## rollmesh {command}", "", "Its keys that a run does not have, or has with another meaning.", "")
        yield from _TABLE_HEAD
        for row in keys_of(config, ""):
            if row not in known:
                key, kind, default, text = row
                yield f"| `{key}` | {kind} | {default} | {text} |"
        yield ""


def keys_of(
    section: type[Section], prefix: str, plain: frozenset[type[Section]] = frozenset()
) -> Iterator[tuple[str, str, str, str]]:
    """The keys of a section; those of an optional one too, unless the same section is there plainly.

    Args:
        section: whose keys are listed.
        prefix: of their names.
        plain: sections whose keys are listed above.
    """
    inside = [field.annotation for field in section.model_fields.values()]
    plain |= {inner for inner in inside if isinstance(inner, type) and issubclass(inner, Section)}
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            yield from keys_of(inner, f"{prefix}{name}.", plain)
            continue
        yield f"{prefix}{name}", _kind(inner), _default(field), (field.description or "").replace("|", "\\|")
        entries = section_of(inner)
        if entries is None:
            continue
        if (origin := get_origin(inner)) in (dict, tuple):
            yield from keys_of(entries, f"{prefix}{name}.{'NAME' if origin is dict else 'N'}.", plain)
        elif origin in (Union, UnionType) and entries not in plain and not holds_several(inner):
            yield from keys_of(entries, f"{prefix}{name}.", plain)


def _kind(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        return _kind(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return " \\| ".join(f"`{value}`" for value in get_args(annotation))
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        kinds = " \\| ".join(_kind(argument) for argument in arguments if argument is not NoneType)
        return f"{kinds}, optional" if NoneType in arguments else kinds
    if origin in (list, tuple):
        return f"list of {_kind(arguments[0])}"
    if origin is dict:
        return "mapping"
    if section_of(annotation) is not None:
        return "section"
    if annotation is Path:
        return "path"
    return {str: "text", int: "integer", float: "number", bool: "true / false"}.get(annotation, "any")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined or value is None or value in ([], {}):
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{list(value) if isinstance(value, tuple) else value}`"
