"""Filters: groups, sequences and tokens that are not trained although they were scored.

Groups are judged one by one before training (`filter_group`). A dropped one is counted under its reason, and another
takes its place. So batches stay full (DAPO's dynamic sampling, arXiv:2503.14476, sec. 3.2). Sequences and whole groups
of a batch that is full already are masked (`truncated_keep`, `advantage_keep`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rollmesh.learner.algorithms.ragged import segment_max, segment_min
from rollmesh.learner.algorithms.settings import Settings, SettingsError
from rollmesh.learner.algorithms.types import Group, Rollouts


@dataclass(frozen=True)
class FilterSettings(Settings):
    """Settings of the filters.

    Attributes:
        zero_variance: drop groups with the same metric for all members: they have no advantage.
        zero_variance_below: a sample standard deviation up to this counts as 0; with 0, even the rounding of the mean
            of equal rewards counts as variance.
        accuracy_low, accuracy_high: keep groups with a mean metric within these bounds, both included.
        metric: `reward`, or the name of a reward component, that the filters above look at.
        min_response_tokens, max_response_tokens: drop groups without any member of a length within these bounds, both
            included.
        truncated: `mask` does not train responses that the token budget ended (DAPO, sec. 3.4, overlong filtering).
        reject_advantages: [low, high]: groups with all advantages in this range are not trained. The batch is smaller
            then, unlike with `zero_variance`, which sees rewards and refills.
    """

    zero_variance: bool = False
    zero_variance_below: float = 1e-6
    accuracy_low: float | None = None
    accuracy_high: float | None = None
    metric: str = "reward"
    min_response_tokens: int | None = None
    max_response_tokens: int | None = None
    truncated: Literal["train", "mask"] = "train"
    reject_advantages: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.zero_variance_below < 0:
            raise SettingsError("zero_variance_below", "must not be negative")
        if self.reject_advantages is not None:
            if len(self.reject_advantages) != 2:
                raise SettingsError("reject_advantages", "expected [low, high]")
            _ordered(*self.reject_advantages, "reject_advantages", "its upper end")
        _ordered(self.accuracy_low, self.accuracy_high, "accuracy_low", "accuracy_high")
        _ordered(self.min_response_tokens, self.max_response_tokens, "min_response_tokens", "max_response_tokens")


def filter_group(group: Group, settings: FilterSettings) -> str | None:
    """The first reason to drop a group, or None to train it.

    Only scored members are looked at. A group of one has no variance to speak of and passes `zero_variance`.

    Args:
        group: rewards, components and lengths of its members.
        settings: of the filters.

    Returns:
        `zero_variance`, `accuracy_low`, `accuracy_high`, `response_too_short`, `response_too_long`,
        `response_length` (members on both sides of the bounds, none within), or `unscored` (no scored member).

    Raises:
        SettingsError: the rewards have no component of the metric's name.
    """
    scored = group.scored
    if not bool(scored.any()):
        return "unscored"
    if settings.zero_variance or settings.accuracy_low is not None or settings.accuracy_high is not None:
        metric = _metric(group, settings.metric)[scored].double()
        mean = float(metric.mean())
        if settings.zero_variance and metric.numel() > 1:
            freedom = metric.numel() - 1
            spread = float(((metric - mean).square().sum() / freedom).sqrt())
            if spread <= settings.zero_variance_below:
                return "zero_variance"
        if settings.accuracy_low is not None and mean < settings.accuracy_low:
            return "accuracy_low"
        if settings.accuracy_high is not None and mean > settings.accuracy_high:
            return "accuracy_high"
    return _length_reason(group.lengths[scored], settings)


def truncated_keep(rollouts: Rollouts) -> Tensor:
    """True for tokens of sequences that ended by themselves, bool [R]."""
    return rollouts.per_token(~rollouts.truncated)


def advantage_keep(rollouts: Rollouts, low: float = 0.0, high: float = 0.0) -> Tensor:
    """False for all tokens of groups with all advantages in [low, high]: they would hardly move the policy.

    Args:
        rollouts: with advantages.
        low, high: the band.

    Returns:
        bool [R].
    """
    assert rollouts.advantages is not None
    groups = rollouts.group_ids[rollouts.sequence_ids]
    largest = segment_max(rollouts.advantages, groups, rollouts.num_groups)
    smallest = segment_min(rollouts.advantages, groups, rollouts.num_groups)
    return ((largest > high) | (smallest < low))[groups]


def _metric(group: Group, name: str) -> Tensor:
    if name == "reward":
        return group.rewards
    if name not in group.components:
        known = ", ".join(["reward", *group.components])
        raise SettingsError("filter.metric", f"the rewards have no component {name!r}", hint=f"known: {known}")
    return group.components[name]


def _length_reason(lengths: Tensor, settings: FilterSettings) -> str | None:
    low, high = settings.min_response_tokens, settings.max_response_tokens
    too_short = torch.zeros_like(lengths, dtype=torch.bool) if low is None else lengths < low
    too_long = torch.zeros_like(lengths, dtype=torch.bool) if high is None else lengths > high
    if not bool((too_short | too_long).all()):
        return None
    if bool(too_short.all()):
        return "response_too_short"
    return "response_too_long" if bool(too_long.all()) else "response_length"


def _ordered(low: float | None, high: float | None, low_name: str, high_name: str) -> None:
    if low is not None and high is not None and low > high:
        raise SettingsError(low_name, f"is over {high_name}: {low} > {high}", hint="no group could pass")
