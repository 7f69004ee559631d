"""Losses of routers, which Megatron adds to the gradient behind the loss's back: their scale, and their metrics.

Megatron multiplies such a loss by the tokens of each process. It expects all gradients to be divided by the tokens of a
batch later. Here gradients are sums of shares that are normalized already. So the scale of these losses is set by
itself: they are means over the tokens that a call computes, whatever the division.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

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
        self.present = bool(config.num_moe_experts and (config.moe_aux_loss_coeff or config.moe_z_loss_coeff))

    @contextmanager
    def scaled(self, batches: Sequence[PackedBatch]) -> Iterator[float]:
        """Scales the losses for a call; gives the factor by which the loss's shares are to be multiplied.

        Args:
            batches: of this data-parallel rank, with trained tokens.
        """
        if not self.present:
            yield 1.0
            return
        own = sum(int(whole_sequences(batch.row.segments).lengths.sum()) for batch in batches)
        (tokens,) = self._world.sum_ints([own if self._layout.has_results else 0])
        factor = float(max(tokens, 1))

        def scale(loss: Tensor) -> Tensor:
            return loss / factor

        # Megatron applies it to the loss as well, so that one takes it back.
        self._config.grad_scale_func = scale
        try:
            yield factor
        finally:
            self._config.grad_scale_func = None

    def forget(self) -> None:
        """Gives up what has been summed for metrics. Models share these sums, and may have other numbers of layers."""
        get_moe_layer_wise_logging_tracker().clear()

    def take_metrics(self, micro_batches: int) -> dict[str, float]:
        """Means of the losses over micro-batches and layers since the last call, without their weights; collective.

        Args:
            micro_batches: that each data-parallel rank has computed.
        """
        if not self.present:
            return {}
        tracker = get_moe_layer_wise_logging_tracker()
        sums = torch.zeros(len(_NAMES), dtype=torch.float64, device=self._world.device)
        for place, name in enumerate(_NAMES):
            if name in tracker:
                sums[place] = tracker[name]["values"].double().sum()
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
