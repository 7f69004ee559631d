"""Accounts that all requests of a process share: limits, budget, times, and counts of requests and answers.

The judge's event loop counts. Other threads read, and say which part of limits and budget is this process's.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rollmesh.mesh.config.scorers.judge import JudgeSection
from rollmesh.reward_service.judge.budget import Budget, Claim, Usage
from rollmesh.reward_service.judge.errors import BusyError
from rollmesh.reward_service.judge.hedging import Hedging
from rollmesh.reward_service.judge.limits import Limits


@dataclass(slots=True)
class Counts:
    """Since the start of the process.

    Attributes:
        requests: sent, the second ones of slow requests included.
        answers: requests by outcome: verdict, wrong, throttled, unavailable, refused.
        votes: verdicts that were used, by origin: asked, kept.
        hedges: second requests for slow ones.
        waits: questions that ended without a request because there was no room.
        wait_s: for which requests waited for their turn, of all together.
        prompt_tokens, answer_tokens: used, by estimate where the endpoint does not count.
        cost: of them.
    """

    requests: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    votes: Counter[str] = field(default_factory=Counter)
    hedges: int = 0
    waits: int = 0
    wait_s: float = 0.0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    cost: float = 0.0


class Accounts:
    """Limits, budget and times of a process.

    Args:
        section: of the configuration.
    """

    def __init__(self, section: JudgeSection) -> None:
        self.limits = Limits(section.requests_per_minute, section.tokens_per_minute, time.monotonic())
        self.budget = Budget(section.budget_tokens, section.budget_cost, section.prompt_price, section.answer_price)
        self.hedging = Hedging(section.hedged_share)
        self.counts = Counts()
        self._concurrency = section.concurrency
        self._share: tuple[float, Callable[[], bool]] = (1.0, lambda: True)
        self._in_force = 1.0

    def set_share(self, share: float, holds: Callable[[], bool], claim: Claim) -> None:
        """Says which part of limits and budget is this process's; from any thread.

        Args:
            share: of the limits, from 0 to 1.
            holds: false once it is void, and nothing may be asked.
            claim: of the budget.
        """
        self._share = (share, holds)
        self.budget.claim = claim

    @property
    def share(self) -> float:
        """The share of the limits at present."""
        share, holds = self._share
        return share if holds() else 0.0

    def limits_now(self) -> Limits:
        """The limits with the present share; for the judge's event loop."""
        if (share := self.share) != self._in_force:
            self.limits.set_share(share, time.monotonic())
            self._in_force = share
        return self.limits

    def most_in_progress(self) -> int:
        """Requests that this process may have in progress: its share, and one at least."""
        return max(1, math.floor(self._concurrency * self.share))

    def reserve(self, estimate: Usage) -> None:
        """Counts a request that is about to be sent.

        Raises:
            SpentError: the budget is spent.
            BusyError: it may not be used at present.
        """
        if not self._share[1]():
            raise BusyError("the mesh has not said which part of limits and budget is this process's")
        self.budget.reserve(estimate)

    def settle(self, estimate: Usage, used: Usage) -> float:
        """Replaces the estimate of a request by its use, and returns what it has cost."""
        self.budget.settle(estimate, used)
        self.counts.prompt_tokens += used.prompt
        self.counts.answer_tokens += used.answer
        cost = self.budget.cost_of(used)
        self.counts.cost += cost
        return cost

    def gauges(self) -> Mapping[str, float]:
        """Values for heartbeats, by name without the service."""
        counts = self.counts
        return {
            "judge_requests": float(counts.requests),
            "judge_errors": float(sum(count for outcome, count in counts.answers.items() if outcome != "verdict")),
        }
