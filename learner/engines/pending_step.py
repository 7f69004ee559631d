"""The part of a step that micro-batches have contributed before the optimizer takes it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from rollmesh.learner.algorithms.metrics import Metrics
from rollmesh.learner.engines.metric_reduction import reduce_metrics
from rollmesh.learner.engines.world import World


@dataclass(slots=True, eq=False)
class PendingStep:
    """The knowledge of this process about a step that accumulates its gradient.

    Attributes:
        loss: 0-d on the device, sum of its micro-batches' shares.
        parts: their metrics; empty where the process has no results.
        tokens: trained tokens in its micro-batches.
        counted: the step's batch has tokens to train, on whichever rank.
        computed: some rank has had a micro-batch, so that there are gradients.
        passing: amid its passes; after an error, one has broken off.
    """

    loss: Tensor
    parts: list[Metrics] = field(default_factory=list)
    tokens: int = 0
    counted: bool = False
    computed: bool = False
    passing: bool = False

    def add(self, loss: Tensor, metrics: Metrics, tokens: int) -> None:
        """Adds a micro-batch of this process.

        Args:
            loss: 0-d, its share.
            metrics: of the share.
            tokens: trained tokens.
        """
        self.loss += loss.detach()
        self.parts.append(metrics)
        self.tokens += tokens

    def metrics(self, world: World) -> dict[str, float]:
        """Loss and metrics over all processes; collective."""
        return reduce_metrics(world, self.parts, self.tokens, self.loss)
