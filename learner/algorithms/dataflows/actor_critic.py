"""Policy gradients with a critic: PPO, and the pieces of VAPO.

Per batch, the critic before its update values every token, and the estimator turns rewards and values into advantages
and returns. In every optimizer step the critic regresses on the returns, then the actor follows its surrogate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from rollmesh.learner.algorithms.aggregation import aggregate
from rollmesh.learner.algorithms.dataflows.policy_gradient import PolicyGradient, PolicyGradientSettings
from rollmesh.learner.algorithms.interface import Batch, Loss
from rollmesh.learner.algorithms.metrics import Metrics, distribution
from rollmesh.learner.algorithms.notices import idle_value_clip
from rollmesh.learner.algorithms.numerics import finite_log_probs
from rollmesh.learner.algorithms.settings import Component, Settings, SettingsError
from rollmesh.learner.algorithms.types import (
    GlobalCounts,
    LossOutput,
    ModelOutput,
    ModelRole,
    Needs,
    Rollouts,
    TokenBatch,
)
from rollmesh.learner.algorithms.value import ValueSettings, value_loss


@dataclass(frozen=True)
class ActorCriticSettings(PolicyGradientSettings):
    """Settings with a critic.

    Attributes:
        advantage: an estimator that reads values.
        value: the critic's loss.
        critic_warmup: batches at the start which train the critic alone; the policy is published unchanged. With
            returns at lambda 1 this is VAPO's value pretraining (arXiv:2504.05118, sec. 4.1).
        positive_lm_coefficient: weight of the negative log-likelihood of correct responses, averaged over their
            tokens (VAPO, eq. 12); 0: off.
        positive_above: responses with a reward over this are correct.
    """

    advantage: Component = Component("gae")  # noqa: RUF009 - frozen
    value: ValueSettings = field(default_factory=ValueSettings)
    critic_warmup: int = 0
    positive_lm_coefficient: float = 0.0
    positive_above: float = 0.5

    def __post_init__(self) -> None:
        PolicyGradientSettings.__post_init__(self)
        if self.critic_warmup < 0:
            raise SettingsError("critic_warmup", f"expected a number >= 0, got {self.critic_warmup}")
        if self.positive_lm_coefficient < 0:
            raise SettingsError(
                "positive_lm_coefficient", f"expected a weight >= 0, got {self.positive_lm_coefficient}"
            )


class ActorCritic(PolicyGradient):
    """Any estimator that reads values, with any loss."""

    settings_type: ClassVar[type[Settings]] = ActorCriticSettings
    settings: ActorCriticSettings
    provides: ClassVar[frozenset[str]] = PolicyGradient.provides | {"values"}

    @property
    def needs(self) -> Needs:
        needs = super().needs
        critic = ModelRole("critic", kind="value_model", trained=True)
        return Needs(
            roles=(critic, *needs.roles),
            group_size=needs.group_size,
            greedy_baseline=needs.greedy_baseline,
            components=needs.components,
            entropy_gradient=needs.entropy_gradient,
            selection=needs.selection,
        )

    @property
    def silent_without_advantage(self) -> bool:
        return super().silent_without_advantage and not self.settings.positive_lm_coefficient

    def notices(self) -> list[str]:
        idle = idle_value_clip(self.settings.value.clip, self.plan)
        return [*super().notices(), *([idle] if idle else [])]

    def batch_stage(self, batch: Batch) -> None:
        rollouts = batch.rollouts
        rollouts.values = batch.infer("critic").values
        super().batch_stage(batch)
        if self.settings.positive_lm_coefficient:
            rollouts.extra["positive_weight"] = positive_weights(rollouts, self.settings.positive_above)
        assert rollouts.values is not None
        batch.report(distribution("critic/values", rollouts.values))
        if rollouts.returns is not None:
            batch.report(distribution("critic/returns", rollouts.returns))
            batch.report({"critic/vf_explained_var": explained_variance(rollouts.values, rollouts.returns)})

    def begins_at(self, role: str) -> int:
        return self.settings.critic_warmup if role == "actor" else 0

    def losses(self, version: int) -> Mapping[str, Loss]:
        if version < self.settings.critic_warmup:
            return {"critic": self.value_loss}
        return {"critic": self.value_loss, "actor": self.loss}

    def value_loss(self, output: ModelOutput, tokens: TokenBatch, counts: GlobalCounts) -> LossOutput:
        """The critic's loss: a micro-batch's share."""
        assert output.values is not None
        assert tokens.old_values is not None
        assert tokens.returns is not None
        value = self.settings.value
        token_loss, metrics = value_loss(
            output.values,
            tokens.old_values,
            tokens.returns,
            clip=value.clip,
            kind=value.kind,
            huber_delta=value.huber_delta,
        )
        return LossOutput(aggregate(token_loss, tokens, counts, self._aggregation, self._horizon), metrics)

    def loss(self, output: ModelOutput, tokens: TokenBatch, counts: GlobalCounts) -> LossOutput:
        surrogate = super().loss(output, tokens, counts)
        weight = self.settings.positive_lm_coefficient
        if not weight:
            return surrogate
        log_probs, _ = output.policy()
        token_loss = -finite_log_probs(log_probs) * tokens.extra["positive_weight"]
        share = token_loss.sum() / max(counts.tokens, 1)
        metrics = surrogate.metrics | Metrics(sums={"actor/positive_lm_loss": token_loss.detach().sum()})
        return LossOutput(surrogate.loss + weight * share, metrics)


def positive_weights(rollouts: Rollouts, above: float) -> Tensor:
    """Weights with a mean of 1 over the batch's tokens, and 0 outside correct responses, [R].

    A mean over all tokens with these weights is the mean over the tokens of correct responses, whatever the
    micro-batches. All are 0 where no response is correct.
    """
    correct = (rollouts.rewards > above)[rollouts.sequence_ids].to(rollouts.behaviour_log_probs.dtype)
    return correct * (correct.numel() / correct.sum().clamp_min(1.0))


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 where the returns do not vary."""
    if returns.numel() < 2:
        return 0.0
    spread = torch.var(returns.double(), correction=0)
    return float(1.0 - torch.var((returns - values).double(), correction=0) / spread) if spread > 0 else 0.0
