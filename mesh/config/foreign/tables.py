"""The tables of verl's and TRL's keys, in YAML files here: one source for errors, imports and the documentation.

A row is about keys, or about keys with one of several values. Its other side is Markdown, in which code spans name our
keys (`rollout.n`) and settings (`algorithm.kl.where=loss`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from rollmesh.mesh.config import yaml_text

Kind = Literal["run", "trainer"]
"""A run, or a training on data."""
_FILES: Mapping[Kind, Mapping[str, str]] = {
    "run": {"verl": "verl.yaml", "TRL": "trl.yaml"},
    "trainer": {"TRL": "trl_trainers.yaml"},
}
_CODE = re.compile(r"`([^`]+)`")
_LEADING = re.compile(r"`[^`]+`(?:, `[^`]+`)*")
_SETTING = re.compile(r"[a-z_]+(\.\w+)*(=|: )\S.*")


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """A key of another project.

    Attributes:
        name: with dots.
        values: for which the row holds; empty: for all.
    """

    name: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """Keys of another project and what stands for them.

    Attributes:
        project: verl or TRL.
        theirs: their keys; empty where the row is about something else.
        ours: Markdown.
        same: the code spans with which `ours` begins stand for `theirs`, in this order. A key takes the value as it is.
            A setting stands for `true`; where theirs is no switch, its key takes the value.
        said: Markdown in place of their keys; empty: the keys.
    """

    project: str
    theirs: tuple[ForeignKey, ...]
    ours: str
    same: bool
    said: str

    def part(self, place: int) -> str | None:
        """The key or setting that stands for the key at a place; None where there is not one for each."""
        leading = _LEADING.match(self.ours)
        spans = [_as_override(span) for span in _CODE.findall(leading[0])] if leading else []
        return spans[place] if len(spans) == len(self.theirs) else None

    @property
    def settings(self) -> list[str]:
        """The settings in `ours`, as `key=value`."""
        return [_as_override(span) for span in _CODE.findall(self.ours) if _SETTING.fullmatch(span)]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows about one subject.

    Attributes:
        title: heading on the page.
        head: of the left column.
        prefix: that the page leaves out in front of their keys.
        rows: in their order.
    """

    title: str
    head: str
    prefix: str
    rows: tuple[Row, ...]


RowsByKey = Mapping[str, tuple[tuple[int, Row], ...]]
"""By a key of theirs: the rows about it, each with the key's place in the row."""


@cache
def tables(kind: Kind) -> tuple[Table, ...]:
    """The tables for configurations of a kind, in the order of the page."""
    found = []
    for project, name in _FILES[kind].items():
        for entry in yaml_text.parse(Path(__file__).with_name(name).read_text(encoding="utf-8")):
            rows = tuple(_row(project, values) for values in entry["rows"])
            found.append(Table(entry["title"], entry["head"], entry.get("prefix", ""), rows))
    return tuple(found)


@cache
def rows_by_key(kind: Kind) -> RowsByKey:
    """By a key of theirs: the rows about it, each with the key's place in the row."""
    found: dict[str, tuple[tuple[int, Row], ...]] = {}
    for table in tables(kind):
        for row in table.rows:
            for place, key in enumerate(row.theirs):
                found[key.name] = (*found.get(key.name, ()), (place, row))
    return found


def plain(markdown: str) -> str:
    """Markdown as text for a terminal."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", markdown).replace("`", "")


def _as_override(span: str) -> str:
    """`algorithm: grpo` as on the command line, `algorithm=grpo`."""
    return re.sub(r"^([a-z_.]+): ", r"\1=", span)


def _row(project: str, values: Mapping[str, Any]) -> Row:
    theirs = tuple(_key(text) for text in values["theirs"])
    return Row(project, theirs, values["ours"], values.get("same", False), values.get("said", ""))


def _key(text: str) -> ForeignKey:
    name, _, values = text.partition(": ")
    return ForeignKey(name, tuple(value.strip('"') for value in values.split(" or ")) if values else ())
