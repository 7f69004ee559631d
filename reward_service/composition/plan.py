"""The composition of one list of parts: which part waits for which, and one outcome from those of all. Pure.

For one item, in this order:

1. A required part that is unscorable makes the item unscorable. No try would change that.
2. Parts that failed, and may not be left out, fail the item. A failure for good comes before one that may pass, and
   last comes one that was only not begun.
3. Parts that are unscorable, that failed and are skipped, or whose gate is shut, are left out.
4. The rest is summed. Where nothing is left, the first error that was skipped fails the item. Without one it is
   unscorable.

Components hold raw totals under the names of parts. A part's own components stand under `part/component`, or under
their own names where it is the only one. Two more tell decisions. `part/gate` is 1 where the gate was open. Where it
was shut it is 0, and so is the raw total. `part/error` is 1 where `on_error` took effect, else 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rollmesh.mesh.config.scorers.parts import depths, gates
from rollmesh.mesh.errors import RewardError
from rollmesh.reward_service.composition.part import Entry, Part, names_of, on_scale, scaled
from rollmesh.reward_service.outcomes import NO_FAILURES, PENDING, Failed, Outcome, Scored, SpanValue, Unscorable

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Shut:
    """The outcome of a part whose gate is shut: its function is not called."""


SHUT = Shut()
PartOutcome = Outcome | Shut


@dataclass(frozen=True, slots=True)
class _Counted:
    """A part that counts: its raw outcome, and whether `on_error` put it there."""

    name: str
    part: Part
    raw: Scored


class Composition:
    """A list of parts as one reward.

    Args:
        entries: the parts, or functions alone.
        normalize: totals that become 0 and 1; none: totals are rewards.

    Attributes:
        parts: in their order.
        names: of the parts.
        gates: for each part the place of the part that it waits for, and the threshold; None without a gate.
        depths: for each part the number of parts that it waits for, one after another.

    Raises:
        RewardError: gates that cannot be, or two parts of one name.
    """

    def __init__(self, entries: Sequence[Entry], normalize: Interval | None = None) -> None:
        self.parts = tuple(Part.of(entry) for entry in entries)
        self.names = names_of(self.parts)
        self._normalize = normalize
        try:
            self.gates = gates(self.names, [part.gate for part in self.parts])
        except ValueError as error:
            raise RewardError(f"reward functions: {error}", hint="see docs/reward-composition.md") from error
        self.depths = depths(self.gates)
        # The common case, and on the hot path.
        self._is_plain = len(self.parts) == 1 and self.parts[0].is_plain and normalize is None

    @property
    def stages(self) -> int:
        """Calls that one item may need one after another, at least 1."""
        return 1 + max(self.depths, default=0)

    def opens(self, place: int, outcome: PartOutcome) -> bool:
        """True if the gate of a part is open, by the outcome of the part that it waits for."""
        gate = self.gates[place]
        assert gate is not None, "asked of parts with a gate"
        raw = self._raw(gate[0], outcome)
        return raw is not None and raw.total > gate[1]

    def compose(self, outcomes: Sequence[PartOutcome]) -> Outcome:
        """One outcome from one of each part, in their order."""
        if self._is_plain:
            only = outcomes[0]
            if isinstance(only, Scored):
                return replace(only, components={self.names[0]: only.total, **only.components})
        if (refused := self._refused(outcomes)) is not None:
            return refused
        counted = list(self._counted(outcomes))
        if not counted:
            return self._nothing(outcomes)
        total = on_scale(sum(each.part.worth(each.raw.total) for each in counted), self._normalize)
        if not math.isfinite(total):
            return Failed("nan", f"the sum of {', '.join(each.name for each in counted)} is {total}")
        per_token, spans = self._details(counted)
        if not all(map(math.isfinite, [*per_token, *(span.value for span in spans)])):
            return Failed("nan", "a sum of per-token values or spans is not finite")
        return Scored(
            total=total,
            components=self._components(outcomes, counted),
            per_token=per_token,
            spans=spans,
            evidence="\n".join(self._evidence(outcomes)),
            cost=sum(each.raw.cost for each in counted),
            cached=not any(
                isinstance(each, Failed) or (isinstance(each, Scored) and not each.cached) for each in outcomes
            ),
            # The first part that reads answers says what the answer is.
            answer=next((each.raw.answer for each in counted if each.raw.answer is not None), None),
        )

    def _raw(self, place: int, outcome: PartOutcome) -> Scored | None:
        """The raw outcome with which a part counts; None where it is left out."""
        if isinstance(outcome, Scored):
            return outcome
        value = self.parts[place].value
        return Scored(value) if isinstance(outcome, Failed) and value is not None else None

    def _counted(self, outcomes: Sequence[PartOutcome]) -> Iterator[_Counted]:
        for place, outcome in enumerate(outcomes):
            if (raw := self._raw(place, outcome)) is not None:
                yield _Counted(self.names[place], self.parts[place], raw)

    def _refused(self, outcomes: Sequence[PartOutcome]) -> Outcome | None:
        """The outcome of an item that one part decides alone."""
        for name, part, outcome in zip(self.names, self.parts, outcomes, strict=True):
            if part.required and isinstance(outcome, Unscorable):
                return Unscorable(f"{name}: {outcome.reason}")
        failures = [
            outcome
            for part, outcome in zip(self.parts, outcomes, strict=True)
            if isinstance(outcome, Failed) and (part.on_error == "fail" or outcome.code in NO_FAILURES)
        ]
        if not failures:
            return None
        # Where one has failed for good, it does not matter that another was not begun.
        first = min(failures, key=lambda failed: (failed.code in NO_FAILURES, failed.code == PENDING, failed.retryable))
        return replace(first, retry_after_s=max(failed.retry_after_s for failed in failures))

    def _nothing(self, outcomes: Sequence[PartOutcome]) -> Outcome:
        """The outcome of an item of which no part counts."""
        if not self.parts:
            return Failed("no_scorer", "no reward function is configured")
        if failed := next((outcome for outcome in outcomes if isinstance(outcome, Failed)), None):
            return failed
        pairs = zip(self.names, outcomes, strict=True)
        return Unscorable("; ".join(f"{name}: {each.reason}" for name, each in pairs if isinstance(each, Unscorable)))

    def _components(self, outcomes: Sequence[PartOutcome], counted: Sequence[_Counted]) -> Mapping[str, float]:
        components: dict[str, float] = {}
        for each in counted:
            prefix = f"{each.name}/" if len(self.parts) > 1 else ""
            components[each.name] = each.raw.total
            components.update({f"{prefix}{name}": value for name, value in each.raw.components.items()})
        for name, part, outcome in zip(self.names, self.parts, outcomes, strict=True):
            if part.gate is not None:
                components[f"{name}/gate"] = float(outcome != SHUT)
                if outcome == SHUT:
                    components[name] = 0.0
            if part.on_error != "fail":
                components[f"{name}/error"] = float(isinstance(outcome, Failed))
        return components

    def _details(self, counted: Sequence[_Counted]) -> tuple[list[float], tuple[SpanValue, ...]]:
        """Sums of per-token values, and spans, which are summed where they are equal."""
        slope = 1.0 if self._normalize is None else 1.0 / (self._normalize[1] - self._normalize[0])
        tokens: list[list[float]] = []
        spans: dict[SpanValue, float] = {}
        for each in counted:
            per_token, rewarded = scaled(each.raw, slope * each.part.factor)
            if per_token:
                tokens.append(per_token)
            for span in rewarded:
                place = span._replace(value=0.0)
                spans[place] = spans.get(place, 0.0) + span.value
        per_token = [sum(values) for values in zip(*tokens, strict=True)]
        return per_token, tuple(place._replace(value=value) for place, value in spans.items())

    def _evidence(self, outcomes: Sequence[PartOutcome]) -> Iterator[str]:
        several = len(self.parts) > 1
        for name, outcome in zip(self.names, outcomes, strict=True):
            if isinstance(outcome, Failed):
                yield f"{name}: {outcome.code}: {outcome.message}"
            elif isinstance(outcome, Scored) and outcome.evidence:
                yield f"{name}: {outcome.evidence}" if several else outcome.evidence
