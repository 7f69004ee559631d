"""Tokens and money that a judge may use in all.

Invariant: a request counts in full before it is sent, by an estimate that is corrected when its use is known. So the
budget is not exceeded by more than the errors of estimates, whatever number of requests is in progress.

Where several processes share a budget, each has claimed a part of it (`reward_service.judge.sharing`).
"""

from __future__ import annotations

from dataclasses import dataclass

from rollmesh.reward_service.judge.errors import BusyError, SpentError

_MILLION = 1e6
# Rounding errors of fractions.
_ROUNDING = 1e-9


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


@dataclass(frozen=True, slots=True)
class Claim:
    """The part of a budget that a process has; all values are shares of the whole, from 0 to 1.

    Attributes:
        most: up to which it may use, with what it has used.
        elsewhere: what others have used.
        processes: that share the rest.
    """

    most: float = 1.0
    elsewhere: float = 0.0
    processes: int = 1


class Budget:
    """The use of a process.

    Args:
        tokens, cost: most of each; None: no limit.
        prompt_price, answer_price: of a million tokens.

    Attributes:
        claim: the part of the budget that is this process's.
        tokens, cost: that it has used.
    """

    def __init__(self, tokens: int | None, cost: float | None, prompt_price: float, answer_price: float) -> None:
        self._most_tokens = tokens
        self._most_cost = cost
        self._prices = (prompt_price, answer_price)
        self.claim = Claim()
        self.tokens = 0
        self.cost = 0.0

    def share_of(self, tokens: float, cost: float) -> float:
        """The share of the budget that a use is; 0 without a budget."""
        return max(
            0.0 if self._most_tokens is None else tokens / self._most_tokens,
            0.0 if self._most_cost is None else cost / self._most_cost,
        )

    @property
    def used(self) -> float:
        """The share of the budget that this process has used."""
        return self.share_of(self.tokens, self.cost)

    def reserve(self, estimate: Usage) -> None:
        """Counts a request that is about to be sent.

        Raises:
            SpentError: there is not enough left for it.
            BusyError: there is, and other processes have claimed it; claims follow the need.
        """
        claim, used = self.claim, self.used
        after = self.share_of(self.tokens + estimate.total, self.cost + self.cost_of(estimate))
        if after > claim.most + _ROUNDING:
            left = (1.0 - claim.elsewhere - used) / claim.processes
            if after - used > left + _ROUNDING:
                raise self._spent(claim.elsewhere)
            raise BusyError("other processes that score have claimed the rest of the budget")
        self._add(estimate, 1)

    def settle(self, estimate: Usage, used: Usage) -> None:
        """Replaces the estimate of a request by its use."""
        self._add(estimate, -1)
        self._add(used, 1)

    def cost_of(self, usage: Usage) -> float:
        """Price of tokens."""
        prompt, answer = self._prices
        return (prompt * usage.prompt + answer * usage.answer) / _MILLION

    def _spent(self, elsewhere: float) -> SpentError:
        if self._most_tokens is not None and (self._most_cost is None or self.used == self.tokens / self._most_tokens):
            tokens = self.tokens + elsewhere * self._most_tokens
            return SpentError(
                f"{tokens:.0f} of {self._most_tokens} tokens are used", hint="raise reward.judge.budget_tokens"
            )
        most = self._most_cost or 0.0
        return SpentError(
            f"{self.cost + elsewhere * most:.4g} of {most:g} is spent", hint="raise reward.judge.budget_cost"
        )

    def _add(self, usage: Usage, sign: int) -> None:
        self.tokens += sign * usage.total
        self.cost += sign * self.cost_of(usage)
