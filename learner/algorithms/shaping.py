"""Reward shaping: length, scale, clip, normalization, in this order.

shaped = normalize(clip((reward + penalties + bias) * scale)). Invariants: nothing is changed in place, no gradient,
the same numbers on every rank; with the default settings rewards come out as they went in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from rollmesh.learner.algorithms.metrics import distribution
from rollmesh.learner.algorithms.penalties import cosine, shortest_correct, soft_overlong
from rollmesh.learner.algorithms.settings import Settings, SettingsError
from rollmesh.learner.algorithms.types import Rollouts


@dataclass(frozen=True)
class RewardSettings(Settings):
    """Reward shaping.

    Attributes:
        overlong_buffer_tokens: DAPO's soft overlong penalty over this many last tokens of the response budget;
            0: none.
        overlong_factor: its size at the whole budget.
        length_reward: `shortest_correct` adds Kimi k1.5's length reward; `cosine` replaces the reward by one that
            depends on correctness and length; see `learner.algorithms.penalties`.
        length_weight: factor of `shortest_correct`.
        correct_above: responses with a reward over this are correct, for `length_reward`.
        truncation_penalty: taken from the reward of responses that the token budget ended.
        bias: added to the reward.
        scale: factor of the reward, after the bias.
        clip: rewards are cut to +-clip; None: not.
        normalize: `batch`: by mean and standard deviation of this batch. `running`: of all batches of the run so far,
            this one included, for critics, whose targets should keep their scale. Group-relative estimators
            normalize by themselves.
    """

    overlong_buffer_tokens: int = 0
    overlong_factor: float = 1.0
    length_reward: Literal["none", "shortest_correct", "cosine"] = "none"
    length_weight: float = 1.0
    correct_above: float = 0.5
    truncation_penalty: float = 0.0
    bias: float = 0.0
    scale: float = 1.0
    clip: float | None = None
    normalize: Literal["none", "batch", "running"] = "none"

    def __post_init__(self) -> None:
        if self.overlong_buffer_tokens < 0:
            raise SettingsError("overlong_buffer_tokens", "must not be negative")
        for name in ("overlong_factor", "truncation_penalty", "length_weight"):
            if getattr(self, name) < 0:
                raise SettingsError(name, "must not be negative", hint="penalties are given by their size")
        if self.clip is not None and self.clip <= 0:
            raise SettingsError("clip", "must be positive", hint="null switches clipping off")

    @property
    def keeps_equal(self) -> bool:
        """True where equal rewards are equal afterwards: nothing depends on a response's length or its end."""
        return not (self.overlong_buffer_tokens or self.truncation_penalty) and self.length_reward == "none"


@dataclass(frozen=True, slots=True)
class RunningMoments:
    """Mean and variance of a stream of numbers, in float64; batches are merged exactly (Chan et al., 1979).

    Attributes:
        count: numbers seen.
        mean: of them.
        m2: sum of squared distances from the mean.
    """

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0

    @property
    def std(self) -> float:
        """Population standard deviation; 0 for fewer than two numbers."""
        return math.sqrt(self.m2 / self.count) if self.count > 1 else 0.0

    def updated(self, values: Tensor) -> RunningMoments:
        """The moments with the values [N] added."""
        count = values.numel()
        if not count:
            return self
        data = values.detach().double()
        mean = float(data.mean())
        m2 = float((data - mean).square().sum())
        total = self.count + count
        shift = mean - self.mean
        return RunningMoments(
            total, self.mean + shift * count / total, self.m2 + m2 + shift * shift * self.count * count / total
        )

    def normalized(self, values: Tensor) -> Tensor:
        """(values - mean) / std in the dtype of the values; only centred where nothing has varied."""
        # Rounding of equal numbers is no variance.
        varies = self.std > 1e-6 * max(1.0, abs(self.mean))
        return (values - self.mean) / (self.std if varies else 1.0)

    def to_wire(self) -> dict[str, float]:
        """The moments as JSON."""
        return {"count": self.count, "mean": self.mean, "m2": self.m2}

    @classmethod
    def from_wire(cls, state: Mapping[str, Any]) -> RunningMoments:
        """Inverse of `to_wire`."""
        return cls(int(state["count"]), float(state["mean"]), float(state["m2"]))


def shape_rewards(
    rollouts: Rollouts, settings: RewardSettings, moments: RunningMoments, *, max_response_tokens: int
) -> tuple[Tensor, RunningMoments, dict[str, float]]:
    """Shapes the rewards of a batch.

    Args:
        rollouts: rewards, lengths, groups and truncation; not changed.
        settings: of the shaping.
        moments: of all earlier batches, for `normalize: running`.
        max_response_tokens: the response budget, for penalties of length.

    Returns:
        Rewards float [S], in the dtype they had; the moments with this batch (unchanged unless `running`); metrics.
        The metrics are distributions: `reward/raw`, one of every penalty in use, and `reward/shaped` where anything is
        done. Also `reward/clipped`, the share of rewards that were cut.
    """
    raw = rollouts.rewards.detach()
    metrics = distribution("reward/raw", raw)
    if settings == RewardSettings():
        return raw.clone(), moments, metrics
    rewards = raw
    for name, term in _length_terms(rollouts, settings, max_response_tokens).items():
        metrics |= distribution(f"reward/{name}", term)
        rewards = rewards + term.to(raw.dtype)
    rewards = (rewards + settings.bias) * settings.scale
    if settings.clip is not None:
        cut = rewards.abs() > settings.clip
        metrics["reward/clipped"] = float(cut.double().mean()) if cut.numel() else 0.0
        rewards = rewards.clamp(-settings.clip, settings.clip)
    if settings.normalize == "running":
        moments = moments.updated(rewards)
        rewards = moments.normalized(rewards)
        metrics |= {"reward/running_mean": moments.mean, "reward/running_std": moments.std}
    elif settings.normalize == "batch":
        rewards = RunningMoments().updated(rewards).normalized(rewards)
    return rewards, moments, metrics | distribution("reward/shaped", rewards)


def _length_terms(rollouts: Rollouts, settings: RewardSettings, max_response_tokens: int) -> dict[str, Tensor]:
    """Terms that are added to the rewards, by name, each [S]."""
    rewards, lengths = rollouts.rewards.detach(), rollouts.lengths
    terms: dict[str, Tensor] = {}
    if settings.length_reward == "cosine":
        shaped = cosine(rewards, lengths, max_response_tokens=max_response_tokens, correct_above=settings.correct_above)
        terms["length_reward"] = shaped - rewards
    elif settings.length_reward == "shortest_correct":
        terms["length_reward"] = settings.length_weight * shortest_correct(
            rewards, lengths, rollouts.group_ids, correct_above=settings.correct_above
        )
    if settings.overlong_buffer_tokens:
        terms["overlong_penalty"] = soft_overlong(
            lengths,
            max_response_tokens=max_response_tokens,
            buffer_tokens=settings.overlong_buffer_tokens,
            factor=settings.overlong_factor,
        )
    if settings.truncation_penalty:
        terms["truncation_penalty"] = -settings.truncation_penalty * rollouts.truncated.to(rewards.dtype)
    return terms
