"""Loss and metrics on held-out rows: in all, and by source where there are several."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from rollmesh.learner.engines.interface import ACTOR, Engine
from rollmesh.learner.engines.pending_step import PendingStep
from rollmesh.learner.trainers.rows import OrderedRows
from rollmesh.learner.trainers.step_batch import StepBatch
from rollmesh.learner.trainers.step_loss import StepLoss

BatchesOf = Callable[[OrderedRows, int], StepBatch]
"""The batch of some rows' step, which counts from 0; collective."""


@torch.no_grad()
def evaluate(
    engine: Engine, loss: StepLoss, sources: Mapping[str, OrderedRows], rows: int, batch_of: BatchesOf
) -> dict[str, float]:
    """Loss and metrics, the same in every process; collective. No batch has rows of two sources.

    Args:
        engine: with the present weights.
        loss: that is trained.
        sources: held-out rows by source.
        rows: of a batch.
        batch_of: makes batches.

    Returns:
        `eval/NAME` over all rows, and with several sources `eval/NAME/SOURCE`. Without anything to measure it is empty.
    """
    total = _Measured(engine)
    found: dict[str, float] = {}
    for label, held_out in sources.items():
        own = _Measured(engine)
        for step in range(held_out.steps(rows) or 0):
            batch = batch_of(held_out, step)
            terms = loss.terms(batch.counts)
            own.terms, total.terms = own.terms + terms, total.terms + terms
            outputs = engine.infer(batch.micro_batches)
            # Where results arise there is one for each micro-batch, elsewhere none.
            for output, micro in zip(outputs, batch.micro_batches, strict=False):
                result = loss(output, micro.tokens, batch.counts)
                for measured in (own, total):
                    measured.pending.add(result.loss * terms, result.metrics, micro.tokens.num_tokens)
        if len(sources) > 1:
            found |= {f"{name}/{label}": value for name, value in own.metrics().items()}
    return {f"eval/{name}": value for name, value in (total.metrics() | found).items()}


class _Measured:
    """The results of some batches."""

    def __init__(self, engine: Engine) -> None:
        self._world = engine.world
        self.pending = PendingStep(torch.zeros((), device=engine.device))
        self.terms = 0.0

    def metrics(self) -> dict[str, float]:
        """Means over all batches; collective."""
        if not self.terms:
            return {}
        found = self.pending.metrics(self._world)
        found["loss"] /= self.terms
        return {name.removeprefix(f"{ACTOR}/"): value for name, value in found.items()}
