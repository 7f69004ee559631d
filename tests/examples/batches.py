"""A batch in memory: a table of logits as the model, so that a dataflow can be stepped without a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollmesh.learner.algorithms.interface import Algorithm, Loss
from rollmesh.learner.algorithms.types import GlobalCounts, ModelOutput, Rollouts, TokenBatch


def output(logits: Tensor, actions: Tensor) -> ModelOutput:
    """The outputs of a model with these logits [R, V] for the tokens [R]."""
    log_probs = logits.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return ModelOutput(log_probs=log_probs.gather(-1, actions[:, None]).squeeze(1), entropy=entropy)


@dataclass
class MemoryBatch:
    """Implements `learner.algorithms.interface.Batch` on one rank, with logits per token for every role."""

    rollouts: Rollouts
    logits: Mapping[str, Tensor]
    actions: Tensor
    version: int = 0
    generator: torch.Generator = field(default_factory=torch.Generator)
    reported: dict[str, float] = field(default_factory=dict)

    def infer(self, role: str, *, sum_pi_squared: bool = False) -> ModelOutput:
        with torch.no_grad():
            return output(self.logits[role], self.actions)

    def train(self, role: str, loss: Loss) -> None:
        raise AssertionError(f"no dataflow here trains {role}")

    def report(self, metrics: Mapping[str, float]) -> None:
        self.reported.update(metrics)


def token_batch(rollouts: Rollouts) -> tuple[TokenBatch, Tensor]:
    """The kept tokens as one micro-batch, and their places in [R]."""
    keep = rollouts.keep if rollouts.keep is not None else torch.ones(rollouts.num_tokens, dtype=torch.bool)
    places = torch.nonzero(keep).squeeze(1)
    sequence_ids = rollouts.sequence_ids[places]

    def kept(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[places]

    assert rollouts.advantages is not None
    return TokenBatch(
        sequence_ids=sequence_ids,
        sequence_lengths=torch.bincount(sequence_ids, minlength=rollouts.num_sequences),
        behaviour_log_probs=rollouts.behaviour_log_probs[places],
        advantages=rollouts.advantages[places],
        staleness=rollouts.staleness[places],
        sequence_rewards=rollouts.rewards,
        proximal_log_probs=kept(rollouts.proximal_log_probs),
        importance_weights=kept(rollouts.importance_weights),
    ), places


def train_step(algorithm: Algorithm, batch: MemoryBatch, lr: float) -> Tensor:
    """Batch stage, loss, gradient step on the actor's logits; gives the new logits."""
    algorithm.batch_stage(batch)
    tokens, places = token_batch(batch.rollouts)
    logits = batch.logits["actor"].clone().requires_grad_(True)
    counts = GlobalCounts(tokens.num_tokens, int((tokens.sequence_lengths > 0).sum()))
    result = algorithm.loss(output(logits[places], batch.actions[places]), tokens, counts)
    result.loss.backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    return (logits - lr * logits.grad).detach()
