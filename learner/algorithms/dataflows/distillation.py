"""On-policy distillation: the student answers, and frozen teachers judge every token of its responses.

The student lowers its reverse KL to a teacher on its own responses,

    KL(student || teacher) = E_{y ~ student} [ sum_t  log student(y_t) - log teacher(y_t) ],

the objective of MiniLLM (arXiv:2306.08543, eq. 1) on the student's own data, as in GKD (arXiv:2306.13649, sec. 3). As a
policy gradient that is an advantage per token (Thinking Machines, "On-Policy Distillation", 2025):

    A_t = log teacher(y_t) - log student(y_t)  (+ discount * A_{t+1}  + reward_coefficient * estimator_t).

The log-probs are those of the sampled tokens, at the temperature of the sampling: all that a teacher answers is one
number per token. Several teachers count by their weights, or the data source of a prompt names its teacher.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from rollmesh.learner.algorithms.dataflows.policy_gradient import PolicyGradient, PolicyGradientSettings
from rollmesh.learner.algorithms.interface import Batch
from rollmesh.learner.algorithms.numerics import log_ratio
from rollmesh.learner.algorithms.ragged import discounted_returns
from rollmesh.learner.algorithms.settings import Settings, SettingsError
from rollmesh.learner.algorithms.types import Estimate, ModelRole, Needs, Rollouts, UpdatePlan

# Roles that other settings name.
_TAKEN = ("actor", "reference")


@dataclass(frozen=True)
class DistillationSettings(PolicyGradientSettings):
    """Settings of the distillation.

    Attributes:
        teachers: weight of each teacher by its role; they need not add up to 1. The model of a role is
            `learner.roles.<role>`, and it needs the tokens of the actor.
        by_data_source: data source -> the only teacher of its prompts. Those of other sources have all teachers.
        discount: how much of the later tokens' advantage a token gets; 0: each token answers for itself.
        reward_coefficient: weight of the estimator's advantages, which come from the rewards; 0: rewards have no part,
            and `reward.functions: [none]` needs none.
    """

    teachers: Mapping[str, float] = field(default_factory=lambda: {"teacher": 1.0})
    by_data_source: Mapping[str, str] = field(default_factory=dict)
    discount: float = 0.0
    reward_coefficient: float = 0.0

    def __post_init__(self) -> None:
        PolicyGradientSettings.__post_init__(self)
        if not self.teachers or any(weight <= 0.0 for weight in self.teachers.values()):
            raise SettingsError("teachers", f"expected roles with weights above 0, got {dict(self.teachers)}")
        for name in _TAKEN:
            if name in self.teachers:
                raise SettingsError("teachers", f"{name!r} is another role", hint="give the teacher another name")
        for source, role in self.by_data_source.items():
            if role not in self.teachers:
                raise SettingsError(
                    f"by_data_source.{source}", f"{role!r} is no teacher", hint=f"teachers: {', '.join(self.teachers)}"
                )
        if not 0.0 <= self.discount <= 1.0:
            raise SettingsError("discount", f"expected 0 .. 1, got {self.discount}")
        if self.reward_coefficient < 0.0:
            raise SettingsError("reward_coefficient", f"expected a weight >= 0, got {self.reward_coefficient}")
        if self.kl.where == "reward" and not self.reward_coefficient:
            raise SettingsError(
                "kl.where", "'reward' has no part while reward_coefficient is 0", hint="set it above 0, or where: loss"
            )


class Distillation(PolicyGradient):
    """Policy gradient on the teachers' judgement of every token, with or without a reward."""

    settings_type: ClassVar[type[Settings]] = DistillationSettings
    settings: DistillationSettings

    def __init__(self, settings: DistillationSettings, plan: UpdatePlan) -> None:
        super().__init__(settings, plan)
        total = sum(settings.teachers.values())
        self._shares = {role: weight / total for role, weight in settings.teachers.items()}

    @property
    def needs(self) -> Needs:
        needs, with_reward = super().needs, self.settings.reward_coefficient > 0.0
        return Needs(
            roles=(*map(ModelRole, self.settings.teachers), *needs.roles),
            group_size=needs.group_size if with_reward else 1,
            greedy_baseline=needs.greedy_baseline and with_reward,
            components=needs.components if with_reward else (),
            entropy_gradient=needs.entropy_gradient,
            selection=needs.selection,
        )

    @property
    def infers_policy(self) -> bool:
        return True

    @property
    def _silent_where_equal(self) -> bool:
        return False

    def _estimate_advantages(self, batch: Batch, policy: Tensor) -> Estimate:
        rollouts, settings = batch.rollouts, self.settings
        judgement = self._judge(batch, policy)
        advantages = discounted_returns(judgement, settings.discount, rollouts.lengths)
        if settings.reward_coefficient:
            rewarded = super()._estimate_advantages(batch, policy).advantages
            advantages = advantages + settings.reward_coefficient * rewarded
        return Estimate(advantages)

    def _judge(self, batch: Batch, policy: Tensor) -> Tensor:
        """Weighted mean over the teachers of log teacher - log student, [R]; reports the divergences."""
        rollouts = batch.rollouts
        judgement = torch.zeros_like(policy)
        for role, shares in self._token_shares(rollouts, policy).items():
            ratio = log_ratio(batch.infer(role).policy()[0], policy)
            judgement += shares * ratio
            judged = shares > 0
            if len(self._shares) > 1 and judged.any():
                batch.report(
                    {
                        f"distillation/{role}/reverse_kl": -_weighted_mean(ratio, rollouts, judged),
                        f"distillation/{role}/share": float(shares.double().mean()),
                    }
                )
        if judgement.numel():
            batch.report({"distillation/reverse_kl": -_weighted_mean(judgement, rollouts)})
        return judgement

    def _token_shares(self, rollouts: Rollouts, like: Tensor) -> dict[str, Tensor]:
        """The share of each teacher at every token, [R]; they add up to 1."""
        only = [self.settings.by_data_source.get(source) for source in rollouts.data_sources]
        shares = {}
        for role, share in self._shares.items():
            by_sequence = [share if name is None else float(name == role) for name in only]
            if any(name is not None for name in only):
                shares[role] = rollouts.per_token(like.new_tensor(by_sequence))
            else:
                shares[role] = torch.full_like(like, share)
        return shares


def _weighted_mean(values: Tensor, rollouts: Rollouts, chosen: Tensor | None = None) -> float:
    """Mean of values [R], over chosen tokens, under the present policy where importance weights are known."""
    weights = rollouts.importance_weights
    weighted = values if weights is None else values * weights
    return float((weighted if chosen is None else weighted[chosen]).double().mean())
