"""The routers of a model: what they choose is recorded, replaced by a generator's choice, and evened out.

Losses are attached to the weights that a router gives, so that their gradient arises in the same backward pass. See
`learner.engines.experts.layer_router`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rollmesh.learner.batching.transfer import to_device
from rollmesh.learner.engines.experts.balance import RouterSums, bias_step, loads_of
from rollmesh.learner.engines.experts.layer_router import SHARES, LayerRouter
from rollmesh.learner.engines.experts.replay import layer_places
from rollmesh.learner.engines.fsdp2.experts.modules import ExpertLayer, expert_layers
from rollmesh.learner.engines.world import World
from rollmesh.mesh.config.parallel import RouterSection
from rollmesh.mesh.errors import ConfigError

# The buffer of architectures that choose experts by their scores and a bias.
_BIAS = "e_score_correction_bias"


class Routers:
    """The routers of a model.

    Args:
        model: before it is sharded.
        section: of the configuration.
        name: of the model, for errors.
        world: the ranks.

    Raises:
        ConfigError: the configuration asks for what these routers do not have.
    """

    def __init__(self, model: nn.Module, section: RouterSection, name: str, world: World) -> None:
        self._section = section
        self._world = world
        modules = dict(model.named_modules())
        self._routers = [
            _Router(layer, module, section) for layer in expert_layers(model) if (module := _router_of(layer, modules))
        ]
        self._check(name)
        for router in self._routers:
            router.attach()

    @property
    def have_losses(self) -> bool:
        """The configuration adds a loss to the gradient."""
        return bool(self._section.load_balance_coeff or self._section.z_loss_coeff)

    def saved(self) -> dict[str, object]:
        """The part of a checkpoint that has the shares of the experts in the last step, as JSON."""
        shares = [router.shares.tolist() for router in self._routers if router.shares is not None]
        return {SHARES: shares} if shares and self._section.load_balance_coeff else {}

    def restore(self, saved: dict[str, object]) -> None:
        """Continues from a checkpoint.

        Args:
            saved: which has what `saved` gave, if any; it is taken out.
        """
        by_layer: Any = saved.pop(SHARES, None)
        for place, router in enumerate(self._routers):
            router.shares = None if by_layer is None else torch.tensor(by_layer[place], device=self._world.device)

    @contextmanager
    def trained(self, weight: float) -> Iterator[None]:
        """Records choices of the forward pass within the context, and has the losses of routers in its gradient.

        Args:
            weight: of each token, in the gradient that ranks average.
        """
        for router in self._routers:
            router.weight, router.recording = weight, True
        try:
            yield
        finally:
            # A backward pass may compute layers again: with the losses, and without being counted.
            for router in self._routers:
                router.recording = False

    def use(self, given: Tensor | None, responses: NDArray[np.float32]) -> None:
        """Prepares a forward pass and what its backward pass computes again.

        Args:
            given: experts of each token that is computed, integers [T, layers, K]; None: the routers choose.
            responses: how often each of them counts, [T].

        Raises:
            DataError: they are of another number of layers.
        """
        if not self._routers:
            return
        replayed = given if self._section.replay else None
        numbers = [router.number for router in self._routers]
        places = [] if replayed is None else layer_places(replayed.shape[1], numbers)
        counts = to_device(responses, self._world.device)
        for place, router in enumerate(self._routers):
            router.given = None if replayed is None else replayed[:, places[place]].long()
            router.responses = counts
            if not router.recording:
                router.weight = 0.0

    def forget(self) -> None:
        """Gives up what has been recorded."""
        for router in self._routers:
            router.sums = None

    def finish_step(self, *, skipped: bool) -> dict[str, float]:
        """Metrics of what was recorded since the last call, and the step of the bias; collective.

        Args:
            skipped: the weights do not change, nor does the bias.
        """
        if not self._routers:
            return {}
        own = torch.stack(
            [
                RouterSums.none(router.experts, self._world.device) if router.sums is None else router.sums
                for router in self._routers
            ]
        )
        self.forget()
        total = self._world.sum(own)
        sums = RouterSums.split(total)
        # One reading for all: the host waits for the device with each.
        metrics = RouterSums.split(total.cpu()).metrics(self._section)
        if skipped or not metrics:
            return metrics
        for router, loads, shares in zip(self._routers, sums.loads, sums.shares, strict=True):
            router.shares = shares
            if self._section.bias_update_rate:
                bias = getattr(router.module, _BIAS)
                bias += bias_step(loads, self._section.bias_update_rate).to(bias)
        return metrics

    def _check(self, name: str) -> None:
        section = self._section
        wanted = next((key for key, value in section if value), None)
        if wanted and not self._routers:
            raise ConfigError(
                f"learner.router.{wanted}: model {name!r} has no routers of experts that this engine knows",
                hint="leave it out",
            )
        if section.bias_update_rate and not all(hasattr(router.module, _BIAS) for router in self._routers):
            raise ConfigError(
                f"learner.router.bias_update_rate: model {name!r} chooses experts by no bias that this engine knows",
                hint="leave it out, or set learner.router.load_balance_coeff instead",
            )


class _Router(LayerRouter):
    """The router of one layer.

    Attributes:
        module: gives logits [T, E], weights [T, K] and experts [T, K].
        number: of the layer in the model.
    """

    def __init__(self, layer: ExpertLayer, module: nn.Module, section: RouterSection) -> None:
        super().__init__(layer.experts, section)
        self.module: Any = module
        self.number = next(int(part) for part in layer.name.split(".") if part.isdigit())

    def attach(self) -> None:
        """Takes part in each call of the module from now on."""
        original = self.module.forward

        def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            with self.choosing() as replayed:
                logits, weights, chosen = original(hidden)
            weights = self.watch(logits, weights, lambda counts: loads_of(chosen, self.experts, counts), replayed)
            return logits, weights, chosen

        self.module.forward = forward


def _router_of(layer: ExpertLayer, modules: dict[str, nn.Module]) -> nn.Module | None:
    """The sibling of the experts that has a weight for each of them; None: it is computed in another way."""
    block = modules[layer.name.rpartition(".")[0]]
    for module in block.children():
        weight = getattr(module, "weight", None)
        chooses = isinstance(getattr(module, "top_k", None), int)
        if module is not layer.module and chooses and weight is not None and len(weight) == layer.experts:
            return module
    return None
