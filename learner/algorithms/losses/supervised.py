"""The loss of supervised fine-tuning."""

from __future__ import annotations

from rollmesh.learner.algorithms.metrics import Metrics
from rollmesh.learner.algorithms.types import GlobalCounts, LossOutput, ModelOutput, TokenBatch


def cross_entropy(output: ModelOutput, tokens: TokenBatch, counts: GlobalCounts) -> LossOutput:
    """Mean negative log-likelihood of the trained tokens: sum_t -log pi(y_t) / N.

    Args:
        output: of the language model, with gradient.
        tokens: not used: every trained token counts the same.
        counts: sizes of the whole batch.
    """
    del tokens
    log_probs, entropy = output.policy()
    metrics = Metrics(sums={"actor/entropy": entropy.detach().sum()})
    return LossOutput(-log_probs.sum() / max(counts.tokens, 1), metrics)
