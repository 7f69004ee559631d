"""Losses of routers, which Megatron adds to the gradient behind the loss's back: their scale, and their metrics.

Megatron multiplies such a loss by the tokens of each process. It expects all gradients to be divided by the tokens of a
batch later. Here gradients are sums of shares that are normalized already. So the scale of these losses is set by
itself: they are means over the tokens of a step, whatever the division. A micro-batch that only fills up ranks counts
with its one token, and as one in the metrics.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rollmesh.learner.algorithms.types import GlobalCounts
from rollmesh.learner.batching.sequences import whole_sequences
from rollmesh.learner.batching.types import PackedBatch
from rollmesh.learner.engines.layout import Layout
from rollmesh.learner.engines.megatron.parallel import ParallelSizes
from rollmesh.learner.engines.world import World

_NAMES = {"load_balancing_loss": "load_balance_loss", "z_loss": "router_z_loss"}


def token_parts(sizes: ParallelSizes) -> int:
    """Processes that divide a micro-batch's tokens where routers see them.

    Megatron-Core 0.16.1 divides the weight of the logits' loss by it, and multiplies by each process's tokens. The loss
    of balance it multiplies by the tokens of all. So the weight of the first is given to it with this factor.
    """
    return sizes.tp * sizes.cp


class RouterLosses:
    """The losses of a model's routers.

    Args:
        config: of the model; its scale of gradients is set here.
        sizes: of the divisions.
        layout: of this process.
        world: all processes.
    """

    def __init__(self, config: TransformerConfig, sizes: ParallelSizes, layout: Layout, world: World) -> None:
        self._config, self._layout, self._world = config, layout, world
        self._parts = token_parts(sizes)
        self._sums = torch.zeros(len(_NAMES), dtype=torch.float64)
        self.present = bool(config.num_moe_experts and (config.moe_aux_loss_coeff or config.moe_z_loss_coeff))

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """Leaves the losses out within the context."""
        config, present = self._config, self.present
        weights = config.moe_aux_loss_coeff, config.moe_z_loss_coeff
        config.moe_aux_loss_coeff, config.moe_z_loss_coeff, self.present = 0.0, None, False
        try:
            yield
        finally:
            config.moe_aux_loss_coeff, config.moe_z_loss_coeff = weights
            self.present = present

    @contextmanager
    def scaled(self, batches: Sequence[PackedBatch], counts: GlobalCounts) -> Iterator[float]:
        """Scales the losses for a call; gives the factor by which the loss's shares are to be multiplied.

        Args:
            batches: of this data-parallel rank.
            counts: of the step's whole batch: a call that has a part of its tokens has this part of the weight.
        """
        if not self.present:
            yield 1.0
            return
        computed = sum(int(whole_sequences(batch.row.segments).lengths.sum()) for batch in batches)
        own = (computed, sum(batch.counts.tokens for batch in batches)) if self._layout.has_results else (0, 0)
        tokens, trained = self._world.sum_ints(own)
        factor = max(tokens, 1) * counts.tokens / max(trained, 1)

        def scale(loss: Tensor) -> Tensor:
            return loss / factor

        # Models share Megatron's sums, and may have other numbers of layers.
        tracker = get_moe_layer_wise_logging_tracker()
        tracker.clear()
        # Megatron applies it to the loss as well, so that one takes it back.
        self._config.grad_scale_func = scale
        try:
            yield factor
        finally:
            self._config.grad_scale_func = None
            for place, name in enumerate(_NAMES):
                if name in tracker:
                    self._sums[place] += tracker[name]["values"].double().sum().cpu()
            tracker.clear()

    def forget(self) -> None:
        """Gives up what has been summed for metrics."""
        self._sums.zero_()

    def take_metrics(self, micro_batches: int) -> dict[str, float]:
        """Means of the losses over micro-batches and layers since the last call, without their weights; collective.

        Args:
            micro_batches: that each data-parallel rank has computed.
        """
        if not self.present:
            return {}
        sums = self._sums.to(self._world.device, copy=True)
        self.forget()
        layers = self._config.moe_layer_freq
        count = sum(layers) if isinstance(layers, list) else self._config.num_layers
        # A process gives the mean of the logits' loss over its own tokens, and its part of the whole balance.
        parts = torch.tensor([1.0, self._parts], dtype=torch.float64, device=sums.device)
        totals = self._world.sum(sums) / (max(micro_batches, 1) * self._layout.dp_size * count * parts)
        wanted = (self._config.moe_aux_loss_coeff, self._config.moe_z_loss_coeff)
        return {
            metric: float(total)
            for metric, total, weight in zip(_NAMES.values(), totals.tolist(), wanted, strict=True)
            if weight
        }
