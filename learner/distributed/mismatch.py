"""Mismatch of learner and generators: the log-probs of one version's tokens, as both compute them.

Tokens with a staleness of 0 were sampled by the very weights that are trained. There the log-probs of learner and
generator differ by rounding alone, unless one of them computes another model. Compared are responses of which every
token is so fresh: later tokens of others may have been sampled with keys and values of older weights.

The log-probs are those of the first update's forward pass, or of the batch stage's where it has one. The latter sees
tokens too that a correction rejects. Only where both pass over every such response, because none has an advantage, one
micro-batch is computed for it. Wrong weights show in just this way: every response earns the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rollmesh.learner.algorithms.correction.ratios import drift
from rollmesh.learner.algorithms.interface import Loss
from rollmesh.learner.algorithms.ragged import segment_max
from rollmesh.learner.algorithms.types import GlobalCounts, LossOutput, ModelOutput, Rollouts, TokenBatch
from rollmesh.learner.batching.types import PackedBatch
from rollmesh.learner.engines.interface import Engine


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Sums over the compared tokens.

    Attributes:
        tokens: compared.
        absolute: of |d|, d = log(learner / generator) per token; nats.
        k3: of e^d - 1 - d; the mean estimates KL(generator || learner) and is never negative; nats.
    """

    tokens: int = 0
    absolute: float = 0.0
    k3: float = 0.0

    def __add__(self, other: Mismatch) -> Mismatch:
        return Mismatch(self.tokens + other.tokens, self.absolute + other.absolute, self.k3 + other.k3)

    @property
    def log_prob_diff(self) -> float:
        """Mean |d|; 0 without tokens."""
        return self.absolute / max(self.tokens, 1)

    @property
    def k3_kl(self) -> float:
        """Mean of k3; 0 without tokens."""
        return self.k3 / max(self.tokens, 1)

    def metrics(self) -> dict[str, float]:
        """`mismatch/...`; the number of tokens alone where it is 0."""
        tokens = {"mismatch/tokens": float(self.tokens)}
        means = {"mismatch/log_prob_diff": self.log_prob_diff, "mismatch/k3_kl": self.k3_kl}
        return tokens | means if self.tokens else tokens


def mismatch_of(log_probs: Tensor, rollouts: Rollouts) -> Mismatch:
    """The mismatch of a whole batch.

    Args:
        log_probs: [R], of the policy before the batch's first update.
        rollouts: the batch.
    """
    sums = _sums(
        log_probs,
        rollouts.behaviour_log_probs,
        rollouts.staleness,
        rollouts.sequence_ids,
        rollouts.num_sequences,
    )
    return _mismatch(sums)


class MismatchMeter:
    """Sums over the micro-batches of a batch's first optimizer step, taken where their loss is computed.

    Args:
        engine: computes the loss that is watched.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sums = torch.zeros(3, dtype=torch.float64, device=engine.device)

    def watching(self, loss: Loss) -> Loss:
        """The same loss; its calls are added to the sums."""

        def watched(output: ModelOutput, tokens: TokenBatch, counts: GlobalCounts) -> LossOutput:
            self._add(output, tokens)
            return loss(output, tokens, counts)

        return watched

    def total(self, sample: Callable[[], PackedBatch | None]) -> Mismatch:
        """The mismatch over all ranks; collective.

        Args:
            sample: one of this rank's micro-batches that can be compared; asked for where the loss has seen no token
                that can, and computed then. None: it has none.
        """
        if (found := self._over_ranks()).tokens:
            return found
        batch = sample()
        if not self._engine.world.max_int(int(batch is not None)):
            return found
        batches = [] if batch is None else [batch]
        for each, output in zip(batches, self._engine.infer(batches), strict=False):
            self._add(output, each.tokens)
        return self._over_ranks()

    def _add(self, output: ModelOutput, tokens: TokenBatch) -> None:
        log_probs, _ = output.policy()
        self._sums += _sums(
            log_probs, tokens.behaviour_log_probs, tokens.staleness, tokens.sequence_ids, tokens.num_sequences
        )

    def _over_ranks(self) -> Mismatch:
        own = self._sums if self._engine.layout.has_results else torch.zeros_like(self._sums)
        return _mismatch(self._engine.world.sum(own))


def any_fresh_response(rollouts: Rollouts) -> bool:
    """True if some response can be compared. The same on every rank, as all hold all rollouts."""
    # In most batches of an asynchronous run no token is fresh: one look suffices.
    return bool((rollouts.staleness <= 0).any()) and bool(fresh_responses(rollouts).any())


def fresh_responses(rollouts: Rollouts) -> Tensor:
    """Flags of the responses that can be compared, bool [S]."""
    owners, count = rollouts.sequence_ids, rollouts.num_sequences
    fresh = _fresh(rollouts.behaviour_log_probs, rollouts.staleness, owners, count)
    return segment_max(fresh.double(), owners, count) > 0


@torch.no_grad()
def _sums(log_probs: Tensor, behaviour: Tensor, staleness: Tensor, sequence_ids: Tensor, num_sequences: int) -> Tensor:
    """Float64 [3]: the fields of `Mismatch`."""
    fresh = _fresh(behaviour, staleness, sequence_ids, num_sequences)
    d = torch.where(fresh, drift(log_probs.double(), behaviour.double()), 0.0)
    return torch.stack((fresh.sum().double(), d.abs().sum(), (torch.expm1(d) - d).sum()))


def _fresh(behaviour: Tensor, staleness: Tensor, sequence_ids: Tensor, num_sequences: int) -> Tensor:
    """Flags of the tokens that can be compared, bool [R]."""
    oldest = segment_max(staleness.double(), sequence_ids, num_sequences)
    # A log-prob that is not finite was not recorded.
    return (oldest[sequence_ids] <= 0) & torch.isfinite(behaviour)


def _mismatch(sums: Tensor) -> Mismatch:
    tokens, absolute, k3 = sums.tolist()
    return Mismatch(int(tokens), absolute, k3)
