"""One response with the outcome of its reward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollmesh.mesh.text import bounded
from rollmesh.protos import reward_pb2

SCORED, UNSCORABLE, ERROR = "scored", "unscorable", "error"
# Characters of grounds in a line.
_SHOWN = 120
# Rewards that differ by less are equal: floats of another order of additions.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Tried:
    """A response that was scored, or was not.

    Attributes:
        name: of its row.
        member: its name in its group.
        outcome: `scored`, `unscorable` or `error`.
        seconds: that the call of its group took.
        total: of a scored one.
        components: parts of the total.
        text: grounds for the score; the reason of another outcome.
        code: of an error.
        cost: in the currency of the service's owner.
        recorded: the reward that its file has; None: none.
        step: of a run's sample; None for others.
        data_source: of its row.
        answer: of the response, as the scorer reads it; None: it reads none.
    """

    name: str
    member: str
    outcome: str
    seconds: float
    total: float = 0.0
    components: Mapping[str, float] = field(default_factory=dict)
    text: str = ""
    code: str = ""
    cost: float = 0.0
    recorded: float | None = None
    step: int | None = None
    data_source: str = ""
    answer: str | None = None

    @classmethod
    def of(
        cls,
        result: reward_pb2.ScoreResult,
        *,
        name: str,
        member: str,
        seconds: float,
        recorded: float | None = None,
        step: int | None = None,
        data_source: str = "",
    ) -> Tried:
        """From a result; the arguments are attributes."""
        scored, error = result.scored, result.error
        outcome = result.WhichOneof("outcome") or ERROR
        text = scored.evidence or result.unscorable.reason or error.message
        return cls(
            name=name,
            member=member,
            outcome=outcome,
            seconds=seconds,
            total=scored.total,
            components=dict(scored.components),
            text=text,
            code=error.code or ("none" if outcome == ERROR else ""),
            cost=scored.cost,
            recorded=recorded,
            step=step,
            data_source=data_source,
            answer=scored.answer if scored.HasField("answer") else None,
        )

    @property
    def differs(self) -> bool:
        """True for another reward than the recorded one, or none where one is recorded."""
        if self.recorded is None:
            return False
        return self.outcome != SCORED or abs(self.total - self.recorded) > _ROUNDING * max(1.0, abs(self.recorded))

    @property
    def verdict(self) -> str:
        """The outcome in a word or two."""
        return f"{self.total:g}" if self.outcome == SCORED else f"{self.outcome} {self.code}".rstrip()

    def line(self, *, explained: bool = True) -> str:
        """The response's outcome for a terminal.

        Args:
            explained: with the grounds or the reason.
        """
        parts = [f"{self.name}/{self.member}", self.verdict]
        # A single function's component repeats the total.
        detail = [f"{name} {value:g}" for name, value in sorted(self.components.items())]
        if len(detail) > 1:
            parts.append(f"({', '.join(detail)})")
        parts.append(f"{1000 * self.seconds:.1f} ms")
        if self.differs:
            parts.append(f"recorded {self.recorded:g}")
        if explained and self.text:
            # An error or a reason says what to do at its end.
            parts.append(repr(bounded(self.text, _SHOWN) if self.outcome == SCORED else self.text))
        return "  ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """All of it for programs."""
        return {
            "name": self.name,
            "member": self.member,
            "step": self.step,
            "data_source": self.data_source,
            "outcome": self.outcome,
            "code": self.code,
            "total": self.total if self.outcome == SCORED else None,
            "components": dict(self.components),
            "answer": self.answer,
            "evidence": self.text,
            "cost": self.cost,
            "seconds": round(self.seconds, 6),
            "recorded": self.recorded,
        }
