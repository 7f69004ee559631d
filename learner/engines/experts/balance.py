"""The balance of experts: how their loads are measured, the loss and the bias that even them out. Pure."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def balance_loss(logits: Tensor, chosen: Tensor) -> Tensor:
    """The loss of unequally used experts over some tokens (Fedus et al., "Switch Transformers", equation 4).

    Args:
        logits: of the router, [T, E].
        chosen: int64 [T, K].

    Returns:
        E times the sum over experts of their share of the choices times their mean probability, 0-d; 1 where all are
        used alike.
    """
    experts = logits.shape[-1]
    shares = loads_of(chosen, experts) / max(1, chosen.numel())
    return experts * (shares * logits.float().softmax(-1).mean(0)).sum()


def loads_of(chosen: Tensor, experts: int) -> Tensor:
    """Tokens of each expert, float32 [E]; the host does not wait for the device, as `torch.bincount` would have it.

    Args:
        chosen: int64, of any shape.
        experts: E.
    """
    flat = chosen.flatten()
    counts = torch.zeros(experts, device=chosen.device)
    return counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.float32))


def z_loss(logits: Tensor) -> Tensor:
    """The loss of large logits over some tokens (Zoph et al., "ST-MoE", equation 5), 0-d.

    Args:
        logits: of the router, [T, E].
    """
    return logits.float().logsumexp(-1).square().mean()


def load_metrics(loads: Tensor) -> dict[str, float]:
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
