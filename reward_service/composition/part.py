"""One part of a reward: a function, and how its raw total counts.

The raw total is bounded by `clip`, then mapped by `range`, then multiplied by `weight`. Per-token values and spans are
shares of it: they are multiplied as it is, and neither bounded nor shifted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

from rollmesh.mesh.config.scorers.parts import OnError, PartSection, distinct_names
from rollmesh.reward_service.function_spec import FunctionSpec, label_of
from rollmesh.reward_service.outcomes import Scored, SpanValue


@dataclass(frozen=True, slots=True)
class Part:
    """A part; its fields are those of `PartSection`, where `use` may be the function itself."""

    use: FunctionSpec
    name: str | None = None
    weight: float = 1.0
    gate: str | None = None
    clip: tuple[float, float] | None = None
    range: tuple[float, float] | None = None
    on_error: OnError = "fail"
    value: float | None = None
    required: bool = False

    @classmethod
    def of(cls, entry: Entry) -> Part:
        """An entry of a list of parts as a part."""
        if isinstance(entry, Part):
            return entry
        return cls(**dict(entry)) if isinstance(entry, PartSection) else cls(entry)

    @property
    def is_plain(self) -> bool:
        """True if it has no option: its raw total is its share of the reward."""
        return self == Part(self.use, self.name)

    @property
    def factor(self) -> float:
        """The share of a raw total, or of a per-token value, that counts in the sum."""
        return self.weight if self.range is None else self.weight / (self.range[1] - self.range[0])

    def worth(self, raw: float) -> float:
        """The number that a raw total adds to the reward."""
        if self.clip is not None:
            raw = min(max(raw, self.clip[0]), self.clip[1])
        return self.weight * on_scale(raw, self.range)

    def with_use(self, use: FunctionSpec) -> Self:
        """The same part with another function."""
        return replace(self, use=use)


Entry = FunctionSpec | PartSection | Part
"""An entry of a list of parts."""


def on_scale(raw: float, bounds: tuple[float, float] | None) -> float:
    """A number where `bounds` become 0 and 1; the number itself without bounds."""
    return raw if bounds is None else (raw - bounds[0]) / (bounds[1] - bounds[0])


def names_of(parts: Iterable[Part]) -> list[str]:
    """Names of parts in components, gates and errors, each another."""
    listed = list(parts)
    return distinct_names([(label_of(part.use), str(part.use)) for part in listed], [part.name for part in listed])


def scaled(scored: Scored, factor: float) -> tuple[list[float], list[SpanValue]]:
    """Per-token values and spans, multiplied."""
    spans = map(SpanValue.of, scored.spans)
    return (
        [factor * value for value in scored.per_token],
        [span._replace(value=factor * span.value) for span in spans],
    )
