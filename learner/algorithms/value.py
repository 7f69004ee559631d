"""The critic's loss: regression of the values on the returns, clipped around the values before the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rollmesh.learner.algorithms.metrics import Metrics
from rollmesh.learner.algorithms.settings import Settings, SettingsError

ValueLossKind = Literal["mse", "huber"]


@dataclass(frozen=True)
class ValueSettings(Settings):
    """The training of the critic.

    Attributes:
        clip: how far a value may move from the old one before the loss stops rewarding it; None: any distance.
            0.5 for rewards of about 1: far enough to learn, near enough that one batch does not destroy the critic.
        kind: `mse`, or `huber`, which is linear beyond `huber_delta`.
        huber_delta: where `huber` becomes linear.
    """

    clip: float | None = 0.5
    kind: ValueLossKind = "mse"
    huber_delta: float = 10.0

    def __post_init__(self) -> None:
        if self.clip is not None and self.clip <= 0:
            raise SettingsError("clip", "must be positive", hint="null switches clipping off")
        if self.huber_delta <= 0:
            raise SettingsError("huber_delta", "must be positive")


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    *,
    clip: float | None = 0.5,
    kind: ValueLossKind = "mse",
    huber_delta: float = 10.0,
) -> tuple[Tensor, Metrics]:
    """Loss of the critic per token.

    `max(l(V - R), l(V' - R))` with `V' = clip(V, V_old - clip, V_old + clip)` and `l(d) = d^2 / 2` (mse). For huber,
    `l(d)` is `delta * (|d| - delta / 2)` beyond delta. The clipped value function is from PPO's reference
    implementation (Schulman et al., arXiv:1707.06347). The larger of the two losses is taken, so that clipping never
    hides an error.

    Args:
        values: float [R], with gradient.
        old_values: float [R], before the batch's first update.
        returns: float [R], the targets.
        clip: None: not clipped.
        kind: form of l.
        huber_delta: see there.

    Returns:
        Loss float [R], and metrics as sums over tokens: `critic/vf_loss`, `critic/vpred_mean`, `critic/vf_clipfrac`,
        `critic/vf_outside`. The last two count tokens with a larger clipped loss, and tokens with a value outside the
        clip range.
    """
    loss = _penalty(values - returns, kind, huber_delta)
    clipped_share = outside = torch.zeros_like(loss)
    if clip is not None:
        near = torch.clamp(values, old_values - clip, old_values + clip)
        near_loss = _penalty(near - returns, kind, huber_delta)
        clipped_share = near_loss > loss
        outside = (values - old_values).abs() > clip
        loss = torch.maximum(loss, near_loss)
    sums = {
        "critic/vf_loss": loss.detach().sum(),
        "critic/vpred_mean": values.detach().sum(),
        "critic/vf_clipfrac": clipped_share.to(loss.dtype).sum(),
        "critic/vf_outside": outside.to(loss.dtype).sum(),
    }
    return loss, Metrics(sums)


def _penalty(error: Tensor, kind: ValueLossKind, delta: float) -> Tensor:
    if kind == "mse":
        return 0.5 * error.square()
    size = error.abs()
    return torch.where(size < delta, 0.5 * error.square(), delta * (size - 0.5 * delta))
