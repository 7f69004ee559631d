"""Answers to keys of verl and TRL in a configuration: what stands for each of them here.

A value is only repeated where it is a number, or one that the tables know: another one may be a misplaced secret.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rollmesh.mesh.config.foreign.tables import Kind, Row, RowsByKey, plain, rows_by_key
from rollmesh.mesh.config.yaml_text import in_line

# Sections of verl's configuration beyond those in the tables, and parts of every Hydra configuration.
_VERL_SECTIONS = ("ray_init", "ray_kwargs", "global_profiler", "transfer_queue", "hydra", "defaults")


@dataclass(frozen=True, slots=True)
class Answer:
    """A key of another project with its value, and what stands for it.

    Attributes:
        key, value: as found.
        project: whose key it is.
        row: about this key, and this value; None: nothing is known to stand for it.
        place: of the key in the row.
        is_listed: the tables know the key, if perhaps not with this value.
    """

    key: str
    value: Any
    project: str
    row: Row | None = None
    place: int = 0
    is_listed: bool = True

    @property
    def setting(self) -> str | None:
        """The override of ours that stands for this key with this value; None where that takes more than the table."""
        if self.row is None or self.row.theirs[self.place].name != self.key:
            return None
        if self.row.theirs[self.place].values:
            return self._setting_of_value(self.row)
        if not self.row.same or self.value is None or (span := self.row.part(self.place)) is None:
            return None
        name, example, _ = span.partition("=")
        if example and isinstance(self.value, bool):
            return span if self.value else None
        return f"{name}={_text(self.value)}"

    def _setting_of_value(self, row: Row) -> str | None:
        settings, values = row.settings, row.theirs[self.place].values
        if len(values) == len(settings) > 1:
            return settings[_index(values, self.value) or 0]
        if len(settings) == len(row.theirs):
            return settings[self.place]
        return settings[0] if settings else None

    @property
    def text(self) -> str:
        """Our side in words."""
        if self.row is None:
            return "nothing to set" if isinstance(self.value, bool) else "nothing stands for this value"
        part = self.row.part(self.place)
        if (setting := self.setting) is not None and (len(self.row.theirs) > 1 or self.row.same):
            return setting if self.row.theirs[self.place].values or _is_harmless(self.value) else setting.split("=")[0]
        return part if part is not None and len(self.row.theirs) > 1 else plain(self.row.ours)


def answers(values: Mapping[str, Any], sections: Collection[str], kind: Kind = "run") -> list[Answer]:
    """The keys of other projects in a configuration, in their order.

    Args:
        values: the configuration, nested.
        sections: names of our own sections.
        kind: of the configuration.
    """
    known = rows_by_key(kind)
    theirs = {key.partition(".")[0] for key in known if "." in key} | {*_VERL_SECTIONS}
    found = []
    for key, value in _flat(values):
        if (about := _row_about(known, key, value)) is not None:
            found.append(Answer(key, value, about[1].project, about[1], about[0]))
        elif key in known or key.partition(".")[0] in theirs.difference(sections):
            project = known[key][0][1].project if key in known else "verl"
            found.append(Answer(key, value, project, is_listed=key in known))
    return found


def without(values: Mapping[str, Any], found: Collection[Answer]) -> dict[str, Any]:
    """A configuration without the keys of the answers, and without sections that are empty then."""
    gone = {answer.key for answer in found}

    def kept(part: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        remaining = {}
        for name, value in part.items():
            key = f"{prefix}{name}"
            if key in gone:
                continue
            if isinstance(value, Mapping) and value and not (value := kept(value, f"{key}.")):
                continue
            remaining[name] = value
        return remaining

    return kept(values, "")


def describe(found: Collection[Answer]) -> str:
    """The answers for a terminal, a line each; keys for which nothing is known share one."""
    projects = " and ".join(dict.fromkeys(answer.project for answer in found))
    answered = [answer for answer in found if answer.is_listed]
    lines = [f"there are keys of {projects}:" if answered else f"there are keys of {projects}"]
    lines += [f"  {_shown(answer)} -> {answer.text}" for answer in answered]
    if others := [answer.key for answer in found if answer not in answered]:
        lines.append(f"  nothing is known to stand for {', '.join(others)}")
    return "\n".join(lines)


def _shown(answer: Answer) -> str:
    known = answer.row is not None and answer.row.theirs[answer.place].values
    return f"{answer.key}={_text(answer.value)}" if known or _is_harmless(answer.value) else answer.key


def _row_about(known: RowsByKey, key: str, value: Any) -> tuple[int, Row] | None:
    """The row about a key with its value, else about the key, else about a section that holds it; and its place."""
    rows = known.get(key, ())
    for place, row in rows:
        if _index(row.theirs[place].values, value) is not None:
            return place, row
    if plainly := [(place, row) for place, row in rows if not row.theirs[place].values]:
        return plainly[0]
    parent = key.rpartition(".")[0]
    return None if rows or not parent else _row_about(known, parent, None)


def _index(values: tuple[str, ...], value: Any) -> int | None:
    return next((number for number, one in enumerate(values) if one.lower() == _text(value).lower()), None)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _text(value: Any) -> str:
    """A value as it is typed: YAML's in a line, without quotes."""
    return in_line(value).strip("'")


def _is_harmless(value: Any) -> bool:
    return isinstance(value, bool | int | float)
