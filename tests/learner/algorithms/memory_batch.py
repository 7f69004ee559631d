"""A batch in memory for tests of dataflows: tabular policies instead of networks, everything else as in the learner."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rollmesh.learner.algorithms.interface import Loss
from rollmesh.learner.algorithms.types import GlobalCounts, ModelOutput, Rollouts, TokenBatch


class MemoryBatch:
    """Every role's model is a table: one row of logits per trained token of the batch (or one value).

    Args:
        rollouts: the batch.
        tokens: int64 [R], index of the sampled token in each row of logits.
        logits: role -> [R, V], for language models.
        values: role -> [R], for value models.
    """

    def __init__(
        self, rollouts: Rollouts, tokens: Tensor, logits: dict[str, Tensor], values: dict[str, Tensor] | None = None
    ) -> None:
        self.rollouts = rollouts
        self.version = 0
        self.generator = torch.Generator().manual_seed(0)
        self.reported: dict[str, float] = {}
        self.tokens = tokens
        self.logits = logits
        self.tables = values or {}

    def infer(self, role: str, *, sum_pi_squared: bool = False) -> ModelOutput:
        with torch.no_grad():
            return self.output(role, sum_pi_squared=sum_pi_squared)

    def output(self, role: str, *, sum_pi_squared: bool = False) -> ModelOutput:
        """As `infer`, with gradient."""
        if role in self.tables:
            return ModelOutput(values=self.tables[role])
        log_probs = self.logits[role].log_softmax(-1)
        probs = log_probs.exp()
        return ModelOutput(
            log_probs=log_probs.gather(1, self.tokens[:, None])[:, 0],
            entropy=-(probs * log_probs).sum(-1),
            sum_pi_squared=probs.square().sum(-1) if sum_pi_squared else None,
        )

    def train(self, role: str, loss: Loss) -> None:
        table = self.logits[role].detach().requires_grad_()
        self.logits[role] = table
        loss(self.output(role), self.token_batch(), self.counts()).loss.backward()
        assert table.grad is not None
        self.logits[role] = (table - 0.5 * table.grad).detach()

    def report(self, metrics: Mapping[str, float]) -> None:
        self.reported.update(metrics)

    def counts(self) -> GlobalCounts:
        """The counts of the whole batch."""
        return GlobalCounts(self.rollouts.num_tokens, int((self.rollouts.lengths > 0).sum()))

    def token_batch(self) -> TokenBatch:
        """The whole batch as one micro-batch, with what the batch stage has filled in so far."""
        data = self.rollouts
        advantages = torch.zeros_like(data.behaviour_log_probs) if data.advantages is None else data.advantages
        return TokenBatch(
            sequence_ids=data.sequence_ids,
            sequence_lengths=data.lengths,
            behaviour_log_probs=data.behaviour_log_probs,
            advantages=advantages,
            staleness=data.staleness,
            sequence_rewards=data.rewards,
            proximal_log_probs=data.proximal_log_probs,
            reference_log_probs=data.reference_log_probs,
            importance_weights=data.importance_weights,
            old_values=data.values,
            returns=data.returns,
            extra=dict(data.extra),
        )
