"""A configuration as YAML with a comment above each setting."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from rollmesh.initialization.proposal import Setting
from rollmesh.mesh.config.yaml_text import in_line

_COLUMNS = 100
_HEAD = "# `rollmesh config schema` lists every key, `rollmesh config explain FILE` what follows from these."


def to_yaml(settings: Sequence[Setting], head: Sequence[str], notes: Sequence[str] = ()) -> str:
    """The text of a configuration.

    Args:
        settings: in the order in which their sections come; those of one section stand together.
        head: comments at the top.
        notes: comments at the end.
    """
    tree: dict[str, Any] = {}
    for setting in settings:
        *path, name = setting.key.split(".")
        section = tree
        for part in path:
            section = _section(section, part)
        section[name] = setting
    lines = [*(f"# {line}" for line in head), _HEAD, *_lines(tree, "")]
    if notes:
        lines += ["", *(part for note in notes for part in _comment(note, ""))]
    return "\n".join(lines) + "\n"


def _section(tree: dict[str, Any], name: str) -> dict[str, Any]:
    """A part of the tree; a name alone, as of a loss, becomes a section with that name."""
    found = tree.setdefault(name, {})
    if isinstance(found, Setting):
        found = tree[name] = {"name": found}
    section: dict[str, Any] = found
    return section


def _lines(tree: dict[str, Any], indent: str) -> list[str]:
    lines = []
    for name, value in tree.items():
        if isinstance(value, Setting):
            lines += [*([""] if not indent else []), *_comment(value.comment, indent)]
            lines.append(f"{indent}{name}: {in_line(value.value)}")
        else:
            lines += [*([""] if not indent else []), f"{indent}{name}:", *_lines(value, f"{indent}  ")]
    return lines


def _comment(text: str, indent: str) -> list[str]:
    mark = f"{indent}# "
    return [f"{mark}{line}" for line in textwrap.wrap(text, _COLUMNS - len(mark), break_long_words=False)]
