"""On-policy distillation: the student answers, and one or several frozen teachers judge every token.

The student lowers its reverse KL to the teacher on its own responses,

    KL(student || teacher) = E_{y ~ student} [ sum_t  log student(y_t) - log teacher(y_t) ],

the objective of MiniLLM (arXiv:2306.08543, eq. 1) on the student's own data (GKD, arXiv:2306.13649). As a policy
gradient that is the advantage

    A_t = log teacher(y_t) - log student(y_t)  (+ discount * A_{t+1}),

one judgement per token where a reward gives one per response. No reward is needed. With several teachers it is the
mean of their advantages by weight, so the student lowers the weighted sum of its divergences. Samples of an older
student are corrected like any other stale data, by default with truncated importance weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch

import rollmesh.learner.algorithms.losses  # noqa: F401 - importing enters the policy losses
from rollmesh.learner.algorithms.aggregation import aggregate, read_aggregation
from rollmesh.learner.algorithms.correction import (
    CorrectionSettings,
    anchor_and_weights,
    check_corrects,
    correct_batch,
    drift_metrics,
)
from rollmesh.learner.algorithms.interface import Algorithm, Batch
from rollmesh.learner.algorithms.metrics import Metrics
from rollmesh.learner.algorithms.numerics import log_ratio
from rollmesh.learner.algorithms.ragged import discounted_returns
from rollmesh.learner.algorithms.registry import build_policy_loss
from rollmesh.learner.algorithms.settings import Component, Settings, SettingsError
from rollmesh.learner.algorithms.types import (
    GlobalCounts,
    LossOutput,
    ModelOutput,
    ModelRole,
    Needs,
    TokenBatch,
    UpdatePlan,
)


@dataclass(frozen=True)
class DistillationSettings(Settings):
    """Settings of the distillation.

    Attributes:
        loss: policy loss, with its settings.
        aggregation: how token losses become the batch's loss.
        correction: what is done about stale tokens.
        discount: how much of the later tokens' advantage a token gets; 0: each token answers for itself.
        teachers: weight of each teacher by its role; they need not add up to 1.
    """

    loss: Component = Component("ppo")  # noqa: RUF009 - frozen
    aggregation: str = "token_mean"
    correction: CorrectionSettings = field(default_factory=CorrectionSettings)
    discount: float = 0.0
    teachers: Mapping[str, float] = field(default_factory=lambda: {"teacher": 1.0})

    def __post_init__(self) -> None:
        if not self.teachers or any(weight <= 0.0 for weight in self.teachers.values()):
            raise SettingsError("teachers", f"expected roles with weights above 0, got {dict(self.teachers)}")
        if not 0.0 <= self.discount <= 1.0:
            raise SettingsError("discount", f"expected 0 .. 1, got {self.discount}")


class Distillation(Algorithm):
    """Policy gradient on the teachers' per-token judgement of the student's own responses."""

    settings_type: ClassVar[type[Settings]] = DistillationSettings
    settings: DistillationSettings

    def __init__(self, settings: DistillationSettings, plan: UpdatePlan) -> None:
        super().__init__(settings, plan)
        check_corrects(settings.correction, plan)
        self._policy_loss, _, _ = build_policy_loss(settings.loss)
        self._aggregation = read_aggregation(settings.aggregation)

    @property
    def needs(self) -> Needs:
        return Needs(roles=tuple(map(ModelRole, self.settings.teachers)))

    def batch_stage(self, batch: Batch) -> None:
        rollouts = batch.rollouts
        student, _ = batch.infer("actor").policy()
        total = sum(self.settings.teachers.values())
        judgement = torch.zeros_like(student)
        for role, share in self.settings.teachers.items():
            teacher, _ = batch.infer(role).policy()
            judgement += share / total * log_ratio(teacher, student)
        rollouts.advantages = discounted_returns(judgement, self.settings.discount, rollouts.lengths)
        rollouts.proximal_log_probs = student
        batch.report(correct_batch(rollouts, self.settings.correction))
        weights = rollouts.importance_weights
        weighted = judgement if weights is None else weights * judgement
        if weighted.numel():
            batch.report({"distillation/reverse_kl": -float(weighted.mean())})

    def loss(self, output: ModelOutput, tokens: TokenBatch, counts: GlobalCounts) -> LossOutput:
        log_probs, entropy = output.policy()
        anchor, weights = anchor_and_weights(log_probs, tokens, self.settings.correction)
        token_loss, metrics = self._policy_loss(log_probs, anchor, tokens)
        if weights is not None:
            token_loss = token_loss * weights
        loss = aggregate(token_loss, tokens, counts, self._aggregation)
        sums = Metrics(sums={"actor/pg_loss": token_loss.detach().sum(), "actor/entropy": entropy.detach().sum()})
        return LossOutput(loss, drift_metrics(log_probs.detach(), tokens) | metrics | sums)
