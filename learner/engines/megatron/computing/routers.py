"""Routers in Megatron's model: what they choose is recorded, and replaced by a generator's choice.

Megatron-Core has a replay of its own, which is set layer by layer for all tokens. Here a token may lack recorded
experts, and the router's own choice is compared with the recorded one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from rollmesh.learner.engines.experts.balance import load_metrics
from rollmesh.learner.engines.experts.replay import ReplayedChoice, layer_places
from rollmesh.learner.engines.megatron.computing.inputs import MegatronInputs
from rollmesh.learner.engines.megatron.parallel import ParallelPlace, ParallelSizes
from rollmesh.learner.engines.world import World

# Tokens, those with given experts, and those of them that would have had others.
_FIGURES = 3


class RouterChoices:
    """The routers of a process's part of the model.

    Args:
        chunks: of the model.
        layers: for each layer of the whole model whether it has experts.
        experts: of a layer; 0: there are none.
        sizes, place: of the process.
        world: all processes.
        replay: choose recorded experts.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        layers: Sequence[bool],
        experts: int,
        sizes: ParallelSizes,
        place: ParallelPlace,
        world: World,
        *,
        replay: bool,
    ) -> None:
        self._sizes, self._place, self._world, self._replay = sizes, place, world, replay
        self._experts = experts
        self._numbers = [number for number, sparse in enumerate(layers) if sparse]
        self._given: Tensor | None = None
        self._recording = False
        self._counts = torch.zeros(len(self._numbers), _FIGURES + experts, dtype=torch.float64, device=world.device)
        for module in (module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)):
            self._attach(module)

    @contextmanager
    def passing(self, inputs: MegatronInputs) -> Iterator[None]:
        """A forward pass; a backward pass that follows it at once computes layers again with the same experts.

        Args:
            inputs: of the micro-batch.
        """
        self._given = self._own_rows(inputs.experts) if self._replay else None
        self._recording = torch.is_grad_enabled()
        try:
            yield
        finally:
            self._recording = False

    def forget(self) -> None:
        """Gives up what has been recorded."""
        self._counts.zero_()

    def take_metrics(self) -> dict[str, float]:
        """Metrics of what was recorded since the last call; collective."""
        if not self._numbers:
            return {}
        counts = self._world.sum(self._counts.clone())
        self.forget()
        tokens, replayed, drifted = counts[:, :_FIGURES].sum(0).tolist()
        metrics = load_metrics(counts[:, _FIGURES:])
        if self._replay and tokens:
            metrics |= {"router_replayed": replayed / tokens, "router_drift": drifted / max(replayed, 1.0)}
        return metrics

    def _own_rows(self, experts: Tensor | None) -> Tensor | None:
        """The rows of tokens that this process's routers see: processes of tensor parallelism divide them."""
        if experts is None or not self._sizes.sequence_parallel:
            return experts
        return experts.chunk(self._sizes.tp)[self._place.tp]

    def _attach(self, router: Any) -> None:
        original, row = router.forward, self._numbers.index(router.layer_number - 1)

        def forward(*arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
            given = self._given
            if given is None:
                probabilities, chosen = original(*arguments, **named)
                self._record(row, chosen, None)
                return probabilities, chosen
            place = layer_places(given.shape[1], self._numbers)[row]
            with ReplayedChoice(given[:, place].long(), self._experts) as replayed:
                probabilities, chosen = original(*arguments, **named)
            self._record(row, chosen, replayed)
            return probabilities, chosen

        router.forward = forward

    def _record(self, row: int, chosen: Tensor, replayed: ReplayedChoice | None) -> None:
        """Counts a choice, bool [T, E]."""
        if not self._recording:
            return
        counts = self._counts[row]
        counts[0] += len(chosen)
        if replayed is not None:
            counts[1] += replayed.replayed
            counts[2] += replayed.drifted
        counts[_FIGURES:] += chosen.sum(0)
