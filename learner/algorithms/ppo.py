"""Clipped policy gradient on complete groups: PPO-clip with any registered advantage and loss, and GRPO."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from learner.algorithms import advantages, policy_losses  # noqa: F401 - importing them fills the registries
from learner.algorithms.aggregation import aggregate, read_aggregation
from learner.algorithms.base import Algorithm, Batch
from learner.algorithms.correction import CorrectionSettings, check_corrects, correct, needs_proximal
from learner.algorithms.metrics import Metrics
from learner.algorithms.registry import build_advantage, build_policy_loss, register_algorithm
from learner.algorithms.settings import Component, Settings
from learner.algorithms.types import GlobalCounts, Group, LossOutput, MemberAdvantages, TokenBatch, UpdatePlan


@dataclass(frozen=True)
class PPOClipSettings(Settings):
    """Settings of `ppo_clip`.

    Attributes:
        advantage: advantage function, with its settings.
        loss: policy loss, with its settings.
        aggregation: how token losses become the batch's loss.
        horizon: length of `seq_mean_token_sum_norm` in tokens; none: the longest response allowed.
        correction: what is done about stale tokens.
    """

    advantage: Component = Component("reward")  # noqa: RUF009 - frozen
    loss: Component = Component("ppo")  # noqa: RUF009 - frozen
    aggregation: str = "token_mean"
    horizon: int | None = None
    correction: CorrectionSettings = field(default_factory=CorrectionSettings)


@register_algorithm("ppo_clip")
class PPOClip(Algorithm):
    """PPO with the clipped surrogate (arXiv:1707.06347), without a critic, corrected for stale data."""

    settings_type: ClassVar[type[Settings]] = PPOClipSettings
    settings: PPOClipSettings

    def __init__(self, settings: PPOClipSettings, plan: UpdatePlan) -> None:
        super().__init__(settings, plan)
        check_corrects(settings.correction, plan)
        self._advantage = build_advantage(settings.advantage)
        self._policy_loss = build_policy_loss(settings.loss)
        self._aggregation = read_aggregation(settings.aggregation)
        self.silent_without_advantage = settings.loss.name in policy_losses.PROPORTIONAL_TO_ADVANTAGE
        self._horizon = float(settings.horizon or plan.max_response_tokens)

    def group_stage(self, group: Group) -> MemberAdvantages | str:
        return self._advantage(group)

    def batch_stage(self, batch: Batch) -> None:
        if needs_proximal(self.settings.correction, self.plan):
            for tokens, log_probs in zip(batch.tokens, batch.log_probs("actor"), strict=True):
                tokens.proximal_log_probs = log_probs

    def loss(self, log_probs: Tensor, entropy: Tensor, tokens: TokenBatch, counts: GlobalCounts) -> LossOutput:
        with torch.no_grad():
            anchor, weights, drift = correct(log_probs.detach(), tokens, self.settings.correction)
        token_loss, metrics = self._policy_loss(log_probs, anchor, tokens)
        if weights is not None:
            token_loss = token_loss * weights
        loss = aggregate(token_loss, tokens, counts, self._aggregation, self._horizon)
        return LossOutput(loss, drift | metrics | Metrics(sums={"policy/entropy": entropy.sum()}))


@dataclass(frozen=True)
class GRPOSettings(PPOClipSettings):
    """Settings of `grpo`: those of `ppo_clip` with the group-relative advantage."""

    advantage: Component = Component("grpo")  # noqa: RUF009 - frozen


@register_algorithm("grpo")
class GRPO(PPOClip):
    """Group relative policy optimization (arXiv:2402.03300): PPO-clip with the group as its baseline."""

    settings_type: ClassVar[type[Settings]] = GRPOSettings
