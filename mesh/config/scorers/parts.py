"""The parts of a reward in the configuration: functions by name, or functions with a weight, a gate and other options.

A list of parts holds names, and sections where a part has options. Their meaning: `reward_service.composition`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from rollmesh.mesh.config.base import FORM, Section
from rollmesh.mesh.user_code import label

Interval = Annotated[tuple[float, float], Field(description="(low, high)")]
OnError = Literal["fail", "skip", "value"]

_GATE = re.compile(r"(?P<name>.+?)(?:\s+above\s+(?P<above>\S+))?")


class PartSection(Section):
    use: str = Field(description="A scorer or function, named as in a list of names.")
    name: str | None = Field(
        None, description="Name of the part in components and gates. None: that of the function, as without options."
    )
    weight: float = Field(1.0, description="Factor of the part in the sum; it may be negative.")
    gate: str | None = Field(
        None,
        description="`PART` or `PART above X`: the part counts only where the raw total of another part is above X "
        "(0). Where it is not, the function is not called.",
    )
    clip: Interval | None = Field(None, description="[low, high]: bounds of the raw total.")
    range: Interval | None = Field(
        None, description="[low, high]: the raw totals that become 0 and 1, after `clip` and before `weight`."
    )
    on_error: OnError = Field(
        "fail",
        description="For a part that fails for good. `fail` fails the item, `skip` leaves the part out. `value` puts "
        "`value` in the place of its raw total. Errors that may pass are first tried again, `reward.attempts` times.",
    )
    value: float | None = Field(None, description="The raw total with `on_error: value`.")
    required: bool = Field(
        False,
        description="An item that the function declares unscorable: true makes the whole item unscorable, false leaves "
        "the part out.",
    )

    @field_validator("name")
    @classmethod
    def _can_be_a_component(cls, value: str | None) -> str | None:
        if value is not None and (not value.strip() or "/" in value):
            raise ValueError("needs some text without `/`, which stands between a part and its own components")
        return value

    @field_validator("gate")
    @classmethod
    def _can_be_read(cls, value: str | None) -> str | None:
        if value is not None:
            gate_of(value)
        return value

    @field_validator("clip", "range")
    @classmethod
    def _is_an_interval(cls, value: Interval | None) -> Interval | None:
        return None if value is None else interval(value)

    @model_validator(mode="after")
    def _value_is_used(self) -> PartSection:
        if (self.on_error == "value") != (self.value is not None):
            raise ValueError("`on_error: value` and a number as `value` go together: give both or none")
        return self


def _form(value: Any) -> str:
    return _NAME if isinstance(value, str) else _PART


_NAME, _PART = f"{FORM}name", f"{FORM}part"
Entry = Annotated[Annotated[str, Tag(_NAME)] | Annotated[PartSection, Tag(_PART)], Discriminator(_form)]


def uses(entries: Iterable[str | PartSection]) -> list[str]:
    """Functions that a list of parts names, as `module:function` and the like."""
    return [entry if isinstance(entry, str) else entry.use for entry in entries]


def all_uses(entries: Iterable[str | PartSection], by_source: Mapping[str, Iterable[str | PartSection]]) -> list[str]:
    """The same of a list of parts, and of those of each source."""
    return uses([*entries, *(entry for own in by_source.values() for entry in own)])


def describe(entry: str | PartSection) -> str:
    """A part in words: `0.1 * format if math above 0`."""
    if isinstance(entry, str):
        return entry
    weight = "" if entry.weight == 1.0 else f"{entry.weight:g} * "
    return f"{weight}{entry.use}{'' if entry.gate is None else f' if {entry.gate}'}"


def describe_all(entries: Iterable[str | PartSection], by_source: Mapping[str, Iterable[str | PartSection]]) -> str:
    """A reward in words, then that of each data source with its own: `exact_match; code: tests + 0.1 * format`."""
    own = (f"{source}: {' + '.join(map(describe, parts))}" for source, parts in by_source.items())
    return "; ".join((" + ".join(map(describe, entries)), *own))


def distinct_names(spelled: Sequence[tuple[str, str]], given: Sequence[str | None]) -> list[str]:
    """Names of parts in components and gates.

    Args:
        spelled: the short name and the full spelling of each function; the latter serves where short ones are equal.
        given: the part's own name, which takes the place of both.
    """
    shown = [own or short for (short, _), own in zip(spelled, given, strict=True)]
    return [
        name if own is not None or shown.count(name) == 1 else f"{full}#{index}"
        for index, (name, own, (_, full)) in enumerate(zip(shown, given, spelled, strict=True))
    ]


def part_names(entries: Sequence[str | PartSection]) -> list[str]:
    """Names of the parts of a list in components and gates."""
    given = [None if isinstance(entry, str) else entry.name for entry in entries]
    return distinct_names([(label(use), use) for use in uses(entries)], given)


def gate_of(text: str) -> tuple[str, float]:
    """A gate's part and threshold.

    Raises:
        ValueError: what stands after `above` is no number.
    """
    found = _GATE.fullmatch(text.strip())
    if found is None:
        raise ValueError("needs `PART` or `PART above X`")
    try:
        above = float(found["above"] or 0.0)
    except ValueError:
        above = math.nan
    if not math.isfinite(above):
        raise ValueError("needs `PART` or `PART above X` with a number for X")
    return found["name"], above


def gates(names: Sequence[str], texts: Sequence[str | None]) -> list[tuple[int, float] | None]:
    """Each part's gate: the place of another part, and the threshold of its raw total.

    Args:
        names: of the parts.
        texts: their gates, `PART` or `PART above X`.

    Raises:
        ValueError: two parts have one name, a gate names no other part, or gates form a cycle.
    """
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"several parts have the name {twice[0]!r}: give each its own `name`")
    found: list[tuple[int, float] | None] = []
    for name, text in zip(names, texts, strict=True):
        if text is None:
            found.append(None)
            continue
        other, above = gate_of(text)
        if other not in names or other == name:
            others = ", ".join(each for each in names if each != name) or "there is none"
            form = "; a threshold is written `PART above X`" if ">" in other else ""
            raise ValueError(f"the gate of {name!r} names no other part: {other!r}; others: {others}{form}")
        found.append((names.index(other), above))
    depths(found)
    return found


def depths(found: Sequence[tuple[int, float] | None]) -> list[int]:
    """For each part the number of parts that have to be known before it, one after another; see `gates`.

    Raises:
        ValueError: gates form a cycle.
    """
    after = {place: () if gate is None else (gate[0],) for place, gate in enumerate(found)}
    depth = [0] * len(found)
    try:
        for place in TopologicalSorter(after).static_order():
            depth[place] = max((depth[before] + 1 for before in after[place]), default=0)
    except CycleError as error:
        raise ValueError("gates form a cycle: no part of it could be the first") from error
    return depth


def check_parts(entries: Sequence[str | PartSection]) -> int:
    """Checks a list of parts as a whole.

    Returns:
        the number of its functions that are called one after another, at most; 0 for an empty list.

    Raises:
        ValueError: see `gates`; or a part is an address.
    """
    if address := next((each.use for each in entries if not isinstance(each, str) and "://" in each.use), None):
        raise ValueError(f"a part with options is a function, and not a service: {address}")
    if not any(isinstance(entry, PartSection) for entry in entries):
        return min(1, len(entries))
    found = gates(part_names(entries), [None if isinstance(entry, str) else entry.gate for entry in entries])
    return 1 + max(depths(found))


def interval(value: tuple[float, float]) -> tuple[float, float]:
    """The interval itself.

    Raises:
        ValueError: it is empty, or so wide that its length is no number.
    """
    low, high = value
    if not low < high or not math.isfinite(high - low):
        raise ValueError(f"needs [low, high] with low < high, got [{low:g}, {high:g}]")
    return value
