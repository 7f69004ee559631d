"""The router of one layer, whatever the engine: it is given experts, is counted, and has losses.

Losses of routers are means over the tokens of a step, each token counted once for each response that it belongs to.
They are sums over tokens, of which each process adds those that it computes. So neither micro-batches nor layouts
change them. The loads in the loss of balance are those of the last step. Those of the present one are known only after
all its forward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from rollmesh.learner.algorithms.types import GlobalCounts
from rollmesh.learner.batching.token_responses import count_tokens
from rollmesh.learner.batching.types import PackedBatch
from rollmesh.learner.engines.experts.balance import RouterSums, balance_loss, z_losses
from rollmesh.learner.engines.experts.replay import ReplayedChoice
from rollmesh.learner.engines.layout import Layout
from rollmesh.learner.engines.world import World
from rollmesh.mesh.config.parallel import RouterSection

SHARES = "expert_shares"
"""The key, in a checkpoint, of the experts' shares in the last step: [layers, E]."""


class LayerRouter:
    """The router of one layer, in passes of micro-batches.

    Args:
        experts: of the layer.
        section: of the configuration.

    Attributes:
        given: experts to choose, int64 [T, K]; None: the router's own choice.
        responses: float32 [T], how often each token counts.
        weight: by which the losses are multiplied; 0: they are left out.
        recording: what is chosen is counted.
        shares: float32 [E], of the choices of the last step; None: there was none, and the balance has no gradient.
        sums: of what was recorded, see `RouterSums`; None: nothing was.
    """

    def __init__(self, experts: int, section: RouterSection) -> None:
        self.experts = experts
        self._section = section
        self.given: Tensor | None = None
        self.responses: Tensor | None = None
        self.weight = 0.0
        self.recording = False
        self.shares: Tensor | None = None
        self.sums: Tensor | None = None

    def choosing(self) -> ReplayedChoice | nullcontext[None]:
        """The context in which the router is called."""
        return nullcontext() if self.given is None else ReplayedChoice(self.given, self.experts)

    def watch(
        self, logits: Tensor, values: Tensor, loads: Callable[[Tensor], Tensor], replayed: ReplayedChoice | None
    ) -> Tensor:
        """Counts a choice, and attaches the losses to values that the model computes with.

        Args:
            logits: of the router, [T, E].
            values: of the router with a gradient, which the losses are to have too.
            loads: from how often each token counts, [T], to how often each expert was chosen, [E].
            replayed: the context of the choice.
        """
        counts, section = self.responses, self._section
        if counts is None or not (self.recording or self.weight):
            return values
        z = z_losses(logits) @ counts if section.z_loss_coeff else counts.new_zeros(())
        probabilities = counts @ logits.float().softmax(-1) if section.load_balance_coeff else None
        if self.recording:
            self._record(counts, z, loads(counts), probabilities, replayed)
        if not (self.weight and logits.requires_grad):
            return values
        loss = (section.z_loss_coeff or 0.0) * z
        if probabilities is not None and self.shares is not None:
            loss = loss + (section.load_balance_coeff or 0.0) * balance_loss(probabilities, self.shares)
        return _WithLoss.apply(values, self.weight * loss) if loss.requires_grad else values

    def _record(
        self,
        counts: Tensor,
        z: Tensor,
        loads: Tensor,
        probabilities: Tensor | None,
        replayed: ReplayedChoice | None,
    ) -> None:
        none = counts.new_zeros(())
        drift = (none, none) if replayed is None else (replayed.replayed @ counts, replayed.drifted @ counts)
        summed = torch.zeros_like(loads) if probabilities is None else probabilities.detach()
        sums = RouterSums.join(torch.stack([counts.sum(), z.detach(), *drift]), loads, summed)
        self.sums = sums if self.sums is None else self.sums + sums


def token_weight(batches: Sequence[PackedBatch], counts: GlobalCounts, layout: Layout, world: World) -> float:
    """The part of a step's loss that each token has; collective.

    Args:
        batches: of this data-parallel rank.
        counts: of the step's whole batch: a call that has a part of its trained tokens has this part of the loss.
        layout: of this process.
        world: all processes.
    """
    own = (sum(count_tokens(batch.row) for batch in batches), sum(batch.counts.tokens for batch in batches))
    counted, trained = world.sum_ints(own if layout.has_results else (0, 0))
    return trained / max(counted * counts.tokens, 1)


class _WithLoss(torch.autograd.Function):
    """Passes values on, and has a loss differentiated with them."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:
        ctx.like = torch.ones_like(loss)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """The loss counts as it is."""
        return gradient, ctx.like
