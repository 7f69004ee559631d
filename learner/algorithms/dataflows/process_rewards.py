"""PRIME: policy gradients with process rewards from an implicit reward model that is trained online.

arXiv:2502.01456. The reward model is a language model phi; its log-ratio to the reference is the reward of every
token. It learns from outcome labels alone, on the policy's own responses, before it rewards them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from rollmesh.learner.algorithms.dataflows.policy_gradient import PolicyGradient, PolicyGradientSettings
from rollmesh.learner.algorithms.interface import Batch
from rollmesh.learner.algorithms.prime import prm_loss
from rollmesh.learner.algorithms.settings import Component, Settings
from rollmesh.learner.algorithms.types import GlobalCounts, LossOutput, ModelOutput, ModelRole, Needs, TokenBatch


@dataclass(frozen=True)
class PrimeSettings(PolicyGradientSettings):
    """Settings of `prime`.

    Attributes:
        advantage: an estimator that reads process rewards.
        prm_beta: scale of the log-ratio in the reward model's loss (sec. 3.2; the paper's 0.05).
        prm_update: train the reward model before it rewards the batch, or after.
        prm_normalize: mean instead of sum of the log-ratio over a response's tokens in the reward model's loss.
    """

    advantage: Component = Component("prime")  # noqa: RUF009 - frozen
    prm_beta: float = 0.05
    prm_update: Literal["before", "after"] = "before"
    prm_normalize: bool = False


class Prime(PolicyGradient):
    """Policy gradient on outcome and implicit process rewards."""

    settings_type: ClassVar[type[Settings]] = PrimeSettings
    settings: PrimeSettings

    @property
    def needs(self) -> Needs:
        needs = super().needs
        reward_model = ModelRole("prm", trained=True)
        return Needs(
            roles=(reward_model, *needs.roles),
            group_size=needs.group_size,
            entropy_gradient=needs.entropy_gradient,
            selection=needs.selection,
        )

    def batch_stage(self, batch: Batch) -> None:
        rollouts = batch.rollouts
        rollouts.reference_log_probs, _ = batch.infer("reference").policy()
        if self.settings.prm_update == "before":
            batch.train("prm", self.reward_model_loss)
        rollouts.extra["prm_log_probs"], _ = batch.infer("prm").policy()
        if self.settings.prm_update == "after":
            batch.train("prm", self.reward_model_loss)
        super().batch_stage(batch)

    def reward_model_loss(self, output: ModelOutput, tokens: TokenBatch, counts: GlobalCounts) -> LossOutput:
        """Cross-entropy of the outcome under the reward model: a micro-batch's share."""
        log_probs, _ = output.policy()
        assert tokens.reference_log_probs is not None
        return prm_loss(
            log_probs,
            tokens.reference_log_probs,
            tokens,
            counts,
            beta=self.settings.prm_beta,
            normalize=self.settings.prm_normalize,
        )
