"""The loss of a trainer, as the loop uses it."""

from __future__ import annotations

from collections.abc import Sequence

from rollmesh.learner.algorithms.interface import Loss
from rollmesh.learner.algorithms.types import GlobalCounts, LossOutput, ModelOutput, TokenBatch
from rollmesh.learner.data.examples import Example
from rollmesh.learner.engines.interface import Engine


class StepLoss:
    """A loss that is a mean over a batch.

    Args:
        loss: gives a micro-batch's share.
        per_sequence: terms of the mean that each sequence has; 0: the mean is over trained tokens.
    """

    def __init__(self, loss: Loss, *, per_sequence: float = 0.0) -> None:
        self._loss = loss
        self._per_sequence = per_sequence

    def __call__(self, output: ModelOutput, tokens: TokenBatch, counts: GlobalCounts) -> LossOutput:
        """See `algorithms.interface.Loss`."""
        return self._loss(output, tokens, counts)

    def terms(self, counts: GlobalCounts) -> float:
        """The number of terms of the mean: losses of several batches are averaged by it."""
        return counts.sequences * self._per_sequence or counts.tokens

    def begin(self, engine: Engine, examples: Sequence[Example | None], token_budget: int) -> Sequence[Example | None]:
        """Looks at a whole batch before its passes; collective.

        Args:
            engine: with the present weights.
            examples: the batch.
            token_budget: tokens per micro-batch.

        Returns:
            The examples that are trained.
        """
        del engine, token_budget
        return examples
