"""All responses that were tried, together: outcomes, quantiles, time, and disagreement with recorded rewards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rollmesh.mesh.text import bounded
from rollmesh.reward_service.outcomes import PENDING
from rollmesh.reward_service.trying.tried import ERROR, SCORED, Tried

_QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
_OF_TIMES = (0.5, 0.95, 0.99, 1.0)
# Slow rows, and rows that disagree, that are named.
_NAMED = 5
# Characters of a reason.
_REASON = 400
_PENDING = (
    "pending: the function has promised these rewards for later, and a trial does not wait for them. A run waits; "
    "`rollmesh reward deliver STORE TICKET VALUE` delivers each by its ticket"
)


@dataclass(frozen=True, slots=True)
class Summary:
    """The summary of a trial.

    Attributes:
        responses: that were tried.
        outcomes: their number by outcome, and for errors by code.
        reasons: of those without a score, the most frequent first, with their number.
        totals: quantiles of scored totals; empty without any.
        mean: of them; None without any.
        call_seconds: quantiles of the time per call; a call has one group.
        per_s: responses per second, over the whole trial.
        cost: of all.
        slowest: rows with the longest calls, one response for each.
        recorded: responses with a recorded reward.
        differing: those of them whose reward is another one now, the greatest differences first.
        sources: responses, scored ones and their mean by data source; empty for a single source.
    """

    responses: int
    outcomes: dict[str, int]
    reasons: dict[str, int]
    totals: dict[float, float]
    mean: float | None
    call_seconds: dict[float, float]
    per_s: float
    cost: float
    slowest: Sequence[Tried]
    recorded: int
    differing: Sequence[Tried]
    sources: dict[str, tuple[int, int, float | None]]

    @property
    def clean(self) -> bool:
        """True without an error and without disagreement."""
        return not self.differing and not any(name.startswith(ERROR) for name in self.outcomes)

    def lines(self) -> Iterator[str]:
        """The summary for a terminal."""
        outcomes = ", ".join(f"{name} {count}" for name, count in self.outcomes.items())
        yield f"{self.responses} responses: {outcomes or '-'}"
        for reason, count in self.reasons.items():
            yield f"  {count} x {bounded(reason, _REASON)!r}"
        if f"{ERROR} {PENDING}" in self.outcomes:
            yield _PENDING
        if self.mean is not None:
            yield f"reward: mean {self.mean:.4g}; {_quantiles(self.totals, 1.0, '')}"
        for source, (responses, scored, mean) in self.sources.items():
            rewards = "-" if mean is None else f"{mean:.4g}"
            yield f"  {source}: {responses} responses, scored {scored}, reward: mean {rewards}"
        if self.call_seconds:
            yield f"time per call: {_quantiles(self.call_seconds, 1000.0, ' ms')}; {self.per_s:.3g} responses/s"
            yield "slowest: " + ", ".join(f"{one.name} {1000 * one.seconds:.0f} ms" for one in self.slowest)
        if self.cost:
            yield f"cost: {self.cost:.4g}"
        if self.recorded:
            yield f"{len(self.differing)} of {self.recorded} recorded rewards are others now"
            for one in self.differing[:_NAMED]:
                yield f"  {one.name}/{one.member}: recorded {one.recorded:g}, now {one.verdict}"

    def to_json(self) -> dict[str, Any]:
        """The summary for programs."""
        return {
            "responses": self.responses,
            "outcomes": self.outcomes,
            "reasons": self.reasons,
            "mean": self.mean,
            "totals": {f"{q:g}": value for q, value in self.totals.items()},
            "call_seconds": {f"{q:g}": round(value, 6) for q, value in self.call_seconds.items()},
            "responses_per_s": round(self.per_s, 3),
            "cost": self.cost,
            "slowest": [[one.name, round(one.seconds, 6)] for one in self.slowest],
            "recorded": self.recorded,
            "differing": [[one.name, one.member, one.recorded, one.verdict] for one in self.differing],
            "sources": {
                source: {"responses": responses, "scored": scored, "mean": mean}
                for source, (responses, scored, mean) in self.sources.items()
            },
        }


def summarize(tried: Sequence[Tried], seconds: float) -> Summary:
    """The summary of responses.

    Args:
        tried: all of them.
        seconds: that the whole trial took.
    """
    outcomes = Counter(f"{one.outcome} {one.code}".rstrip() for one in tried)
    reasons = Counter(one.text for one in tried if one.outcome != SCORED and one.text)
    totals = sorted(one.total for one in tried if one.outcome == SCORED)
    # Responses of one row were scored by one call.
    calls = {one.name: one for one in tried}
    times = sorted(one.seconds for one in calls.values())
    differing = [one for one in tried if one.differs]
    return Summary(
        len(tried),
        dict(outcomes.most_common()),
        dict(reasons.most_common(_NAMED)),
        quantiles(totals, _QUANTILES),
        sum(totals) / len(totals) if totals else None,
        quantiles(times, _OF_TIMES),
        len(tried) / seconds if seconds > 0 else 0.0,
        sum(one.cost for one in tried),
        sorted(calls.values(), key=lambda one: -one.seconds)[:_NAMED],
        sum(one.recorded is not None for one in tried),
        sorted(differing, key=_difference, reverse=True),
        _by_source(tried),
    )


def _by_source(tried: Sequence[Tried]) -> dict[str, tuple[int, int, float | None]]:
    groups: dict[str, list[Tried]] = {}
    for one in tried:
        groups.setdefault(one.data_source, []).append(one)
    if len(groups) < 2:
        return {}
    totals = {source: [one.total for one in own if one.outcome == SCORED] for source, own in groups.items()}
    return {
        source: (len(own), len(totals[source]), sum(totals[source]) / len(totals[source]) if totals[source] else None)
        for source, own in groups.items()
    }


def quantiles(ordered: Sequence[float], places: Sequence[float]) -> dict[float, float]:
    """Quantiles of sorted values, interpolated between neighbours; empty without values."""
    return {place: _quantile(ordered, place * (len(ordered) - 1)) for place in places} if ordered else {}


def _quantile(ordered: Sequence[float], position: float) -> float:
    low = int(position)
    first, second = ordered[low], ordered[min(low + 1, len(ordered) - 1)]
    return first + (position - low) * (second - first)


def _difference(one: Tried) -> float:
    return abs(one.total - (one.recorded or 0.0)) if one.outcome == SCORED else float("inf")


def _quantiles(found: dict[float, float], factor: float, unit: str) -> str:
    names = {0.0: "least", 0.5: "median", 1.0: "most"}
    return ", ".join(f"{names.get(q, f'{q:.0%}')} {factor * value:.4g}{unit}" for q, value in found.items())
