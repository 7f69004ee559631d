"""Tokens and money that a judge may use in all.

Invariant: a request counts in full before it is sent, by an estimate that is corrected when its use is known. So the
budget is not exceeded by more than the errors of estimates, whatever number of requests is in progress.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollmesh.reward_service.judge.errors import SpentError

_MILLION = 1e6


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request: `prompt` and `answer`."""

    prompt: int
    answer: int

    @property
    def total(self) -> int:
        """The sum of both."""
        return self.prompt + self.answer


UNUSED = Usage(0, 0)


class Budget:
    """The use of a process.

    Args:
        tokens, cost: most of each; None: no limit.
        prompt_price, answer_price: of a million tokens.
    """

    def __init__(self, tokens: int | None, cost: float | None, prompt_price: float, answer_price: float) -> None:
        self._most_tokens = tokens
        self._most_cost = cost
        self._prices = (prompt_price, answer_price)
        self.tokens = 0
        self.cost = 0.0

    def reserve(self, estimate: Usage) -> None:
        """Counts a request that is about to be sent.

        Raises:
            SpentError: there is not enough left for it.
        """
        if self._most_tokens is not None and self.tokens + estimate.total > self._most_tokens:
            raise SpentError(
                f"{self.tokens} of {self._most_tokens} tokens are used", hint="raise reward.judge.budget_tokens"
            )
        if self._most_cost is not None and self.cost + self._cost(estimate) > self._most_cost:
            raise SpentError(f"{self.cost:.4g} of {self._most_cost:g} is spent", hint="raise reward.judge.budget_cost")
        self._add(estimate, 1)

    def settle(self, estimate: Usage, used: Usage) -> None:
        """Replaces the estimate of a request by its use."""
        self._add(estimate, -1)
        self._add(used, 1)

    def _add(self, usage: Usage, sign: int) -> None:
        self.tokens += sign * usage.total
        self.cost += sign * self._cost(usage)

    def _cost(self, usage: Usage) -> float:
        prompt, answer = self._prices
        return (prompt * usage.prompt + answer * usage.answer) / _MILLION
