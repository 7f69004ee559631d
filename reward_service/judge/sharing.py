"""Limits and a budget that several processes share: the claims of each, and the part that it may use.

Each process publishes claims in its heartbeats, and reads those of all others. It uses less at once. It uses more only
once a reading shows its own newest claim, and all claims together are no more than the whole. If two grow at the same
time, the one that reads later sees both claims.

Invariant: all processes together never use more than the whole, also while some come, end or are cut off. Pure
decisions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a whole, from 0 to 1, that a process has published; the number is that of the publication."""

    amount: float = 0.0
    number: int = 0

    def next(self, seen: Part, wanted: float) -> Part:
        """The part to publish now; a growth waits until the part before was seen.

        Args:
            seen: by this process of itself, in its last reading.
            wanted: amount.
        """
        if wanted == self.amount or (wanted > self.amount and seen.number != self.number):
            return self
        return Part(wanted, self.number + 1)

    def in_force(self, now: float, seen: Part, others: float) -> float:
        """The amount that may be used after a reading.

        Args:
            now: that was in force until now.
            seen: of itself, in the reading.
            others: sum of all others' in the same reading.
        """
        fits = seen.number == self.number and others + self.amount <= 1.0 + _ROUNDING
        return self.amount if fits else min(now, self.amount)


@dataclass(frozen=True, slots=True)
class Standing:
    """The word of a process on itself.

    Attributes:
        share: of the limits.
        claim: of the budget, up to which it may use, with what it has used.
        tokens, cost: that it has used.
    """

    share: Part = Part()
    claim: Part = Part()
    tokens: float = 0.0
    cost: float = 0.0

    def again(self) -> Standing:
        """The same under new numbers, so that it has to be seen again."""
        share, claim = (replace(part, number=part.number + 1) for part in (self.share, self.claim))
        return replace(self, share=share, claim=claim)

    def gauges(self) -> dict[str, float]:
        """As heartbeats carry it."""
        return {
            "judge_share": self.share.amount,
            "judge_share_number": float(self.share.number),
            "judge_claim": self.claim.amount,
            "judge_claim_number": float(self.claim.number),
            "judge_tokens": self.tokens,
            "judge_cost": self.cost,
        }

    @classmethod
    def of(cls, gauges: Mapping[str, float]) -> Standing:
        """From the gauges of a member; one that has published nothing claims nothing."""
        share, claim = (
            Part(gauges.get(f"judge_{name}", 0.0), int(gauges.get(f"judge_{name}_number", 0.0)))
            for name in ("share", "claim")
        )
        return cls(share, claim, gauges.get("judge_tokens", 0.0), gauges.get("judge_cost", 0.0))


@dataclass(frozen=True, slots=True)
class Others:
    """The others, as a process knows them.

    Attributes:
        standings: of those that live.
        used: shares of the budget that they have used.
        gone: share of the budget that those have used which have ended.
    """

    standings: Sequence[Standing] = ()
    used: Sequence[float] = ()
    gone: float = 0.0

    @property
    def processes(self) -> int:
        """All that live, with this one."""
        return len(self.standings) + 1

    @property
    def elsewhere(self) -> float:
        """The share of the budget that others have used."""
        return self.gone + sum(self.used)

    @property
    def shares(self) -> float:
        """Their shares of the limits."""
        return _sum(standing.share for standing in self.standings)

    @property
    def claims(self) -> float:
        """Their claims of the budget, with the use of those that have ended."""
        return self.gone + _sum(standing.claim for standing in self.standings)

    def wanted_share(self) -> float:
        """The share of the limits that a process should publish: an equal one, of what is free."""
        return max(0.0, min(1.0 / self.processes, 1.0 - self.shares))

    def wanted_claim(self, used: float) -> float:
        """The claim of the budget that it should publish: its use, and an equal part of the rest.

        Args:
            used: the share of the budget that it has used.
        """
        left = max(0.0, 1.0 - self.elsewhere - used)
        return max(used, min(used + left / self.processes, 1.0 - self.claims))


def _sum(parts: Iterable[Part]) -> float:
    return sum(part.amount for part in parts)
