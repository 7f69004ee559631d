"""The balance of experts: how their loads are measured, the loss and the bias that even them out. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rollmesh.mesh.config.parallel import RouterSection

# Tokens, losses of logits, tokens with given experts, and those of them that would have had others.
_VALUES = 4


def balance_loss(probabilities: Tensor, shares: Tensor) -> Tensor:
    """The loss of unequally used experts (Fedus et al., "Switch Transformers", equation 4), summed over tokens.

    Args:
        probabilities: of the experts, summed over tokens, [E].
        shares: of the choices of all tokens of a step (Qiu et al., "Demons in the Detail", arXiv 2501.11873), [E].

    Returns:
        E times the sum of the products, 0-d; 1 for each token where all experts are used alike.
    """
    return len(shares) * (shares * probabilities).sum()


def loads_of(chosen: Tensor, experts: int, weights: Tensor | None = None) -> Tensor:
    """Tokens of each expert, float32 [E]; the host does not wait for the device, as `torch.bincount` would have it.

    Args:
        chosen: int64, of any shape.
        experts: E.
        weights: float32, how often each row of `chosen` counts; None: once.
    """
    flat = chosen.flatten()
    counts = torch.zeros(experts, device=chosen.device)
    if weights is None:
        return counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.float32))
    return counts.scatter_add_(0, flat, weights.unsqueeze(-1).expand_as(chosen).flatten())


def z_losses(logits: Tensor) -> Tensor:
    """The loss of large logits of each token (Zoph et al., "ST-MoE", equation 5), float32 [T].

    Args:
        logits: of the router, [T, E].
    """
    return logits.float().logsumexp(-1).square()


@dataclass(frozen=True, slots=True)
class RouterSums:
    """The work of all routers of a model in a step, summed over tokens of all processes.

    Attributes:
        values: float64 [layers, 4]: tokens, losses of logits, tokens with given experts, those that would have had
            others.
        loads: float64 [layers, E], choices of each expert.
        probabilities: float64 [layers, E], of each expert; 0 where there is no loss of balance.
    """

    values: Tensor
    loads: Tensor
    probabilities: Tensor

    @staticmethod
    def join(values: Tensor, loads: Tensor, probabilities: Tensor) -> Tensor:
        """The sums of one layer as one tensor, float64 [4 + 2 E]."""
        return torch.cat([values, loads, probabilities]).double()

    @staticmethod
    def none(experts: int, device: torch.device) -> Tensor:
        """The sums of a layer that has computed nothing."""
        return torch.zeros(_VALUES + 2 * experts, dtype=torch.float64, device=device)

    @classmethod
    def split(cls, sums: Tensor) -> RouterSums:
        """The sums in tensors of `join`, one of each layer: [layers, 4 + 2 E]."""
        values, rest = sums[:, :_VALUES], sums[:, _VALUES:]
        loads, probabilities = rest.chunk(2, dim=1)
        return cls(values, loads, probabilities)

    @property
    def shares(self) -> Tensor:
        """Shares of the experts in the choices of each layer, float32 [layers, E]."""
        return (self.loads / self.loads.sum(-1, keepdim=True)).float()

    def metrics(self, section: RouterSection) -> dict[str, float]:
        """Metrics of a step, means over layers; none where no token was computed.

        Args:
            section: of the configuration: says which ones are wanted.
        """
        tokens, z, replayed, drifted = self.values.sum(0).tolist()
        if not tokens:
            return {}
        metrics = dict(load_metrics(self.loads))
        if section.load_balance_coeff:
            mean = self.probabilities / self.values[:, :1]
            metrics["load_balance_loss"] = float(self.loads.shape[1] * (self.shares.double() * mean).sum(-1).mean())
        if section.z_loss_coeff:
            metrics["router_z_loss"] = z / tokens
        if section.replay:
            metrics |= {"router_replayed": replayed / tokens, "router_drift": drifted / max(replayed, 1.0)}
        return metrics


def load_metrics(loads: Tensor) -> Mapping[str, float]:
    """Metrics of how evenly experts are used.

    Args:
        loads: tokens of each expert by layer, [layers, E].

    Returns:
        Of the layer where it is largest, the most tokens of an expert over the mean. And the entropy of the experts'
        shares over that of equal ones, mean of the layers. Nothing where there were no tokens.
    """
    loads = loads.double().cpu()
    totals = loads.sum(-1, keepdim=True)
    if not loads.numel() or not bool((totals > 0).all()):
        return {}
    shares = loads / totals
    experts = loads.shape[-1]
    entropy = torch.special.entr(shares).sum(-1) / math.log(max(experts, 2))
    return {"expert_load_max": float(shares.max()) * experts, "expert_load_entropy": float(entropy.mean())}


def bias_step(loads: Tensor, rate: float) -> Tensor:
    """The change of the bias with which experts are chosen (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

    Args:
        loads: tokens of each expert, [E].
        rate: of the change.

    Returns:
        `rate` up for experts with less than the mean load, and down for those with more; [E].
    """
    loads = loads.float()
    return rate * torch.sign(loads.mean() - loads)
