"""The routers of a model: what they choose is recorded, replaced by a generator's choice, and evened out.

Losses of routers are means over the tokens of a step, whatever its division. Each process contributes its own tokens.
They are attached to the weights that a router gives, so that their gradient arises in the same backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rollmesh.learner.engines.experts.balance import balance_loss, bias_step, load_metrics, loads_of, z_loss
from rollmesh.learner.engines.experts.replay import ReplayedChoice, layer_places
from rollmesh.learner.engines.fsdp2.experts.modules import ExpertLayer, expert_layers
from rollmesh.learner.engines.world import World
from rollmesh.mesh.config.parallel import RouterSection
from rollmesh.mesh.errors import ConfigError

# The buffer of architectures that choose experts by their scores and a bias.
_BIAS = "e_score_correction_bias"
# Passes, both losses, tokens, those with given experts, and those of them that would have had others.
_VALUES = 6


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
            _Router(layer, module) for layer in expert_layers(model) if (module := _router_of(layer, modules))
        ]
        self._check(name)
        for router in self._routers:
            router.attach(section)

    @property
    def have_losses(self) -> bool:
        """The configuration adds a loss to the gradient."""
        return bool(self._section.load_balance_coeff or self._section.z_loss_coeff)

    @contextmanager
    def trained(self, weight: float) -> Iterator[None]:
        """Records choices of the forward pass within the context, and gives the losses of routers this weight.

        Args:
            weight: of this process's tokens of the micro-batch, in the gradient that ranks average.
        """
        for router in self._routers:
            router.weight, router.recording = weight, True
        try:
            yield
        finally:
            # A backward pass may compute layers again: with the losses, and without being counted.
            for router in self._routers:
                router.recording = False

    def use(self, given: Tensor | None) -> None:
        """Prepares a forward pass and what its backward pass computes again.

        Args:
            given: experts of each token that is computed, integers [T, layers, K]; None: the routers choose.

        Raises:
            DataError: they are of another number of layers.
        """
        replayed = given if self._section.replay else None
        numbers = [router.layer for router in self._routers]
        places = [] if replayed is None or not numbers else layer_places(replayed.shape[1], numbers)
        for number, router in enumerate(self._routers):
            router.given = None if replayed is None else replayed[:, places[number]].long()
            if not router.recording:
                router.weight = 0.0

    def forget(self) -> None:
        """Gives up what has been recorded."""
        for router in self._routers:
            router.counts = None

    def finish_step(self, *, skipped: bool) -> dict[str, float]:
        """Metrics of what was recorded since the last call, and the step of the bias; collective.

        Args:
            skipped: the weights do not change, nor does the bias.
        """
        if not self._routers:
            return {}
        widest = max(router.experts for router in self._routers)
        own = torch.stack([router.padded_counts(widest, self._world.device) for router in self._routers])
        self.forget()
        counts = self._world.sum(own)
        if self._section.bias_update_rate and not skipped:
            for router, load in zip(self._routers, counts[:, _VALUES:], strict=True):
                bias = getattr(router.module, _BIAS)
                bias += bias_step(load[: router.experts], self._section.bias_update_rate).to(bias)
        # One reading for all: the host waits for the device with each.
        counts = counts.cpu()
        values, loads = counts[:, :_VALUES], counts[:, _VALUES:]
        passes, balance, z, tokens, replayed, drifted = values.sum(0).tolist()
        if not passes:
            return {}
        metrics = load_metrics(loads[:, : min(router.experts for router in self._routers)])
        if self._section.load_balance_coeff:
            metrics["load_balance_loss"] = balance / passes
        if self._section.z_loss_coeff:
            metrics["router_z_loss"] = z / passes
        if self._section.replay:
            metrics |= {"router_replayed": replayed / tokens, "router_drift": drifted / max(replayed, 1.0)}
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
                f"learner.router.bias_update_rate: model {name!r} does not choose experts by a bias",
                hint="leave it out, or set learner.router.load_balance_coeff instead",
            )


class _Router:
    """The router of one layer.

    Attributes:
        module: gives logits [T, E], weights [T, K] and experts [T, K].
        experts: of the layer.
        layer: its number in the model.
        given: experts to choose, int64 [T, K].
        weight: of its losses.
        recording: counts what it chooses.
        counts: numbers of `_VALUES`, and the tokens of each expert.
    """

    def __init__(self, layer: ExpertLayer, module: nn.Module) -> None:
        self.module: Any = module
        self.experts = layer.experts
        self.layer = next(int(part) for part in layer.name.split(".") if part.isdigit())
        self.given: Tensor | None = None
        self.weight = 0.0
        self.recording = False
        self.counts: Tensor | None = None

    def attach(self, section: RouterSection) -> None:
        """Takes part in each call of the module from now on."""
        original = self.module.forward

        def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            if self.given is None:
                logits, weights, chosen = original(hidden)
                return logits, self._watched(section, logits, weights, chosen, None), chosen
            with ReplayedChoice(self.given, self.experts) as replayed:
                logits, weights, chosen = original(hidden)
            return logits, self._watched(section, logits, weights, chosen, replayed), chosen

        self.module.forward = forward

    def padded_counts(self, experts: int, device: torch.device) -> Tensor:
        """The counts of so many experts, float64."""
        counts = torch.zeros(_VALUES + experts, dtype=torch.float64, device=device)
        if self.counts is not None:
            counts[: len(self.counts)] = self.counts
        return counts

    def _watched(
        self, section: RouterSection, logits: Tensor, weights: Tensor, chosen: Tensor, replayed: ReplayedChoice | None
    ) -> Tensor:
        """The weights, with the losses attached."""
        zero = logits.new_zeros((), dtype=torch.float32)
        used = self.weight > 0.0 or self.recording
        balance = balance_loss(logits, chosen) if used and section.load_balance_coeff else zero
        z = z_loss(logits) if used and section.z_loss_coeff else zero
        if self.recording:
            drift = (zero, zero) if replayed is None else (replayed.replayed, replayed.drifted)
            values = [zero + 1, balance.detach(), z.detach(), zero + len(chosen), *drift]
            loads = loads_of(chosen, self.experts).double()
            counts = torch.cat([torch.stack([value.double() for value in values]), loads])
            self.counts = counts if self.counts is None else self.counts + counts
        loss = (section.load_balance_coeff or 0.0) * balance + (section.z_loss_coeff or 0.0) * z
        if self.weight > 0.0 and loss.requires_grad:
            weights = _WithLoss.apply(weights, self.weight * loss)
        return weights


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


def _router_of(layer: ExpertLayer, modules: dict[str, nn.Module]) -> nn.Module | None:
    """The sibling of the experts that has a weight for each of them; None: it is computed in another way."""
    block = modules[layer.name.rpartition(".")[0]]
    for module in block.children():
        weight = getattr(module, "weight", None)
        chooses = isinstance(getattr(module, "top_k", None), int)
        if module is not layer.module and chooses and weight is not None and len(weight) == layer.experts:
            return module
    return None
