"""Routers in Megatron's model: what they choose is recorded, replaced by a generator's choice, and evened out.

Megatron-Core has replay and losses of its own. Its replay is set layer by layer for all tokens. Here a token may lack
recorded experts, and the router's own choice is compared with the recorded one. Its losses are means over each
micro-batch, or over those of a step so far (`global_aux_loss`), and depend on the division. Here they are those of
`learner.engines.experts.layer_router`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from rollmesh.learner.algorithms.types import GlobalCounts
from rollmesh.learner.batching.types import PackedBatch
from rollmesh.learner.engines.experts.balance import RouterSums
from rollmesh.learner.engines.experts.layer_router import SHARES, LayerRouter, token_weight
from rollmesh.learner.engines.experts.replay import layer_places
from rollmesh.learner.engines.layout import Layout
from rollmesh.learner.engines.megatron.computing.inputs import MegatronInputs
from rollmesh.learner.engines.megatron.parallel import ParallelPlace, ParallelSizes
from rollmesh.learner.engines.world import World
from rollmesh.mesh.config.parallel import RouterSection


class Routers:
    """The routers of a process's part of the model.

    Args:
        chunks: of the model.
        layers: for each layer of the whole model whether it has experts.
        experts: of a layer; 0: there are none.
        section: of the configuration.
        sizes, place, layout: of the process.
        world: all processes.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        layers: Sequence[bool],
        experts: int,
        section: RouterSection,
        sizes: ParallelSizes,
        place: ParallelPlace,
        layout: Layout,
        world: World,
    ) -> None:
        self._section, self._experts = section, experts
        self._sizes, self._place, self._layout, self._world = sizes, place, layout, world
        self._numbers = [number for number, sparse in enumerate(layers) if sparse]
        # By place among the layers with experts, those of this process.
        self._own: dict[int, LayerRouter] = {}
        self._shares: Tensor | None = None
        for module in (module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)):
            row = self._numbers.index(module.layer_number - 1)
            self._own[row] = LayerRouter(experts, section)
            _attach(module, self._own[row])

    def saved(self) -> dict[str, object]:
        """The part of a checkpoint that has the shares of the experts in the last step, as JSON."""
        return {} if self._shares is None else {SHARES: self._shares.tolist()}

    def restore(self, saved: dict[str, object]) -> None:
        """Continues from a checkpoint.

        Args:
            saved: which has what `saved` gave, if any; it is taken out.
        """
        by_layer: Any = saved.pop(SHARES, None)
        self._continue_from(None if by_layer is None else torch.tensor(by_layer, device=self._world.device))

    @contextmanager
    def trained(self, batches: Sequence[PackedBatch], counts: GlobalCounts) -> Iterator[None]:
        """Has the losses of routers in the gradient of passes within the context; collective.

        Args:
            batches: of this data-parallel rank.
            counts: of the step's whole batch.
        """
        wanted = self._numbers and (self._section.load_balance_coeff or self._section.z_loss_coeff)
        weight = token_weight(batches, counts, self._layout, self._world) if wanted else 0.0
        for router in self._own.values():
            router.weight = weight
        try:
            yield
        finally:
            for router in self._own.values():
                router.weight = 0.0

    @contextmanager
    def without_losses(self) -> Iterator[None]:
        """Leaves the losses out within the context, for the probe."""
        section, self._section = self._section, RouterSection()
        try:
            yield
        finally:
            self._section = section

    @contextmanager
    def passing(self, inputs: MegatronInputs) -> Iterator[None]:
        """A forward pass, whose choices are recorded where it has a gradient.

        Args:
            inputs: of the micro-batch.
        """
        self.resume(inputs)
        recording = torch.is_grad_enabled()
        for router in self._own.values():
            router.recording = recording
        try:
            yield
        finally:
            for router in self._own.values():
                router.recording = False

    def resume(self, inputs: MegatronInputs) -> None:
        """Prepares the backward pass of a micro-batch, which may compute layers again; others may have come between."""
        if not self._own:
            return
        given = self._own_rows(inputs.experts) if self._section.replay and inputs.experts is not None else None
        places = [] if given is None else layer_places(given.shape[1], self._numbers)
        responses = self._own_rows(inputs.responses)
        for row, router in self._own.items():
            router.given = None if given is None else given[:, places[row]].long()
            router.responses = responses

    def forget(self) -> None:
        """Gives up what has been recorded."""
        for router in self._own.values():
            router.sums = None

    def finish_step(self, *, skipped: bool) -> dict[str, float]:
        """Metrics of what was recorded since the last call; collective.

        Args:
            skipped: the weights do not change.
        """
        if not self._numbers:
            return {}
        own = RouterSums.none(self._experts, self._world.device).repeat(len(self._numbers), 1)
        for row, router in self._own.items():
            if router.sums is not None:
                own[row] = router.sums
        self.forget()
        total = self._world.sum(own)
        # One reading for all: the host waits for the device with each.
        metrics = RouterSums.split(total.cpu()).metrics(self._section)
        if self._section.load_balance_coeff and metrics and not skipped:
            self._continue_from(RouterSums.split(total).shares)
        return metrics

    def _continue_from(self, shares: Tensor | None) -> None:
        self._shares = shares
        for row, router in self._own.items():
            router.shares = None if shares is None else shares[row]

    def _own_rows(self, rows: Tensor) -> Tensor:
        """The rows of tokens that this process's routers see: processes of tensor parallelism divide them."""
        return rows.chunk(self._sizes.tp)[self._place.tp] if self._sizes.sequence_parallel else rows


def _attach(module: Any, router: LayerRouter) -> None:
    """Has a router take part in each choice of a module, which has the logits [tokens, 1, E]."""
    original = module.routing

    def routing(logits: Tensor, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
        with router.choosing() as replayed:
            probabilities, chosen = original(logits, *arguments, **named)

        def loads(counts: Tensor) -> Tensor:
            return counts @ chosen.to(counts.dtype)

        return router.watch(logits.flatten(0, -2), probabilities, loads, replayed), chosen

    module.routing = routing
