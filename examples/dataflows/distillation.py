"""On-policy distillation: the student answers, a frozen teacher says of every token what it thinks of it.

The student lowers its reverse KL to the teacher on its own responses,

    KL(student || teacher) = E_{y ~ student} [ sum_t  log student(y_t) - log teacher(y_t) ],

the objective of MiniLLM (arXiv:2306.08543, eq. 1) on the student's own data (GKD, arXiv:2306.13649). As a policy
gradient that is the advantage

    A_t = log teacher(y_t) - log student(y_t)  (+ discount * A_{t+1}),

one judgement per token where a reward gives one per response. No reward is needed. Tokens that an older student
sampled are weighted with min(student / behaviour, cap).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import learner.algorithms.losses  # noqa: F401 - importing enters the policy losses
from learner.algorithms.aggregation import aggregate, read_aggregation
from learner.algorithms.base import Algorithm, Batch
from learner.algorithms.metrics import Metrics
from learner.algorithms.numerics import finite_log_probs, log_ratio
from learner.algorithms.ragged import discounted_returns
from learner.algorithms.registry import build_policy_loss
from learner.algorithms.settings import Component, Settings, SettingsError
from learner.algorithms.types import GlobalCounts, LossOutput, ModelOutput, Needs, Role, TokenBatch, UpdatePlan


@dataclass(frozen=True)
class DistillationSettings(Settings):
    """Settings of the distillation.

    Attributes:
        loss: policy loss, with its settings.
        aggregation: how token losses become the batch's loss.
        discount: how much of the later tokens' advantage a token gets; 0: each token answers for itself.
        cap: bound of the importance weights.
    """

    loss: Component = Component("ppo")  # noqa: RUF009 - frozen
    aggregation: str = "token_mean"
    discount: float = 0.0
    cap: float = 2.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.discount <= 1.0:
            raise SettingsError("discount", f"expected 0 .. 1, got {self.discount}")
        if self.cap < 1.0:
            raise SettingsError("cap", f"expected a bound >= 1, got {self.cap}")


class Distillation(Algorithm):
    """Policy gradient on the teacher's per-token judgement of the student's own responses."""

    settings_type: ClassVar[type[Settings]] = DistillationSettings
    settings: DistillationSettings

    def __init__(self, settings: DistillationSettings, plan: UpdatePlan) -> None:
        super().__init__(settings, plan)
        self._policy_loss, _, _ = build_policy_loss(settings.loss)
        self._aggregation = read_aggregation(settings.aggregation)

    @property
    def needs(self) -> Needs:
        return Needs(roles=(Role("teacher"),))

    def batch_stage(self, batch: Batch) -> None:
        rollouts = batch.rollouts
        student, _ = batch.infer("actor").policy()
        teacher, _ = batch.infer("teacher").policy()
        judgement = log_ratio(teacher, student)
        rollouts.advantages = discounted_returns(judgement, self.settings.discount, rollouts.lengths)
        rollouts.proximal_log_probs = student
        weights = log_ratio(student, rollouts.behaviour_log_probs).exp()
        rollouts.importance_weights = weights.clamp_max(self.settings.cap)
        if rollouts.num_tokens:
            weighted = weights.clamp_max(self.settings.cap) * judgement
            batch.report({"distillation/reverse_kl": -float(weighted.mean())})

    def loss(self, output: ModelOutput, tokens: TokenBatch, counts: GlobalCounts) -> LossOutput:
        log_probs, entropy = output.policy()
        log_probs = finite_log_probs(log_probs)
        assert tokens.proximal_log_probs is not None, "the batch stage computed it"
        assert tokens.importance_weights is not None, "the batch stage computed it"
        token_loss, metrics = self._policy_loss(log_probs, tokens.proximal_log_probs, tokens)
        loss = aggregate(token_loss * tokens.importance_weights, tokens, counts, self._aggregation)
        return LossOutput(loss, metrics | Metrics(sums={"policy/entropy": entropy.detach().sum()}))
