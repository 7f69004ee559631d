"""Policy gradients without a critic: one dataflow, put together from a registered estimator and a registered loss.

The steps: filter groups; shape rewards; run the models that the settings call for; correct for staleness; estimate
advantages. Then, per micro-batch: the surrogate loss, weighted, plus KL and entropy terms, divided by global counts.
 GRPO, DAPO, RLOO and the others are presets of it (`learner.algorithms.presets`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

import rollmesh.learner.algorithms.advantages
import rollmesh.learner.algorithms.losses  # noqa: F401 - importing both fills the registries
from rollmesh.learner.algorithms.advantages.whitening import whiten
from rollmesh.learner.algorithms.aggregation import aggregate, read_aggregation
from rollmesh.learner.algorithms.correction import (
    CorrectionSettings,
    anchor_and_weights,
    check_corrects,
    correct_batch,
    drift_metrics,
    interpolated_proximal,
    needs_proximal,
)
from rollmesh.learner.algorithms.dataflows.resampling import ResampleSettings, pf_ppo_weights, resample
from rollmesh.learner.algorithms.entropy import EntropySettings, applied_entropy_coefficient, next_entropy_coefficient
from rollmesh.learner.algorithms.filters import FilterSettings, advantage_keep, filter_group, truncated_keep
from rollmesh.learner.algorithms.interface import Algorithm, Batch
from rollmesh.learner.algorithms.kl import KLSettings, kl_estimate, kl_rewards, next_coefficient, sampling_ratio
from rollmesh.learner.algorithms.losses.modifiers import off_policy_sequence_keep, top_entropy_selection
from rollmesh.learner.algorithms.metrics import Metrics, distribution
from rollmesh.learner.algorithms.notices import idle_loss_settings, ratio_is_one
from rollmesh.learner.algorithms.registry import POLICY_LOSSES, build_advantage, build_policy_loss, keyword_settings
from rollmesh.learner.algorithms.settings import Component, Settings, SettingsError
from rollmesh.learner.algorithms.shaping import RewardSettings, RunningMoments, shape_rewards
from rollmesh.learner.algorithms.types import (
    Estimate,
    GlobalCounts,
    Group,
    LossOutput,
    ModelOutput,
    ModelRole,
    Needs,
    Rollouts,
    StepView,
    TokenBatch,
    UpdatePlan,
)


@dataclass(frozen=True)
class PolicyGradientSettings(Settings):
    """Settings of every algorithm that is put together from parts.

    Attributes:
        advantage: estimator, with its settings.
        loss: policy loss, with its settings.
        aggregation: how token losses become the batch's loss.
        horizon: length of `seq_mean_token_sum_norm` in tokens; none: the longest response allowed.
        normalize_advantages: `batch` whitens the advantages over the batch's tokens; those that the correction or
            `filter.truncated` leaves out have no say.
        correction: weights and rejection of stale tokens.
        kl: distance to the reference policy, in the reward or in the loss.
        entropy: bonus for the policy's entropy.
        reward: shaping, before the estimator sees the rewards.
        filter: groups that are not trained, and the treatment of truncated responses.
        resample: which sequences of the batch are trained how often.
        off_policy_mask: sequences with negative advantage are not trained where mean(log behaviour - log proximal)
            is over this (DeepSeek-V3.2, arXiv:2512.02556, eq. 9).
        top_entropy_quantile: train only this share of tokens, those of highest entropy (arXiv:2506.01939, eq. 5).
    """

    advantage: Component = Component("grpo")  # noqa: RUF009 - frozen
    loss: Component = Component("ppo")  # noqa: RUF009 - frozen
    aggregation: str = "token_mean"
    horizon: int | None = None
    normalize_advantages: Literal["none", "batch"] = "none"
    correction: CorrectionSettings = field(default_factory=CorrectionSettings)
    kl: KLSettings = field(default_factory=KLSettings)
    entropy: EntropySettings = field(default_factory=EntropySettings)
    reward: RewardSettings = field(default_factory=RewardSettings)
    filter: FilterSettings = field(default_factory=FilterSettings)
    resample: ResampleSettings = field(default_factory=ResampleSettings)
    off_policy_mask: float | None = None
    top_entropy_quantile: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < self.top_entropy_quantile <= 1.0:
            raise SettingsError("top_entropy_quantile", f"expected a share in (0, 1], got {self.top_entropy_quantile}")


class PolicyGradient(Algorithm):
    """Any estimator with any loss."""

    settings_type: ClassVar[type[Settings]] = PolicyGradientSettings
    settings: PolicyGradientSettings
    provides: ClassVar[frozenset[str]] = frozenset(
        {"baseline_rewards", "components", "sum_pi_squared", "proximal_log_probs", "reference_log_probs"}
    )

    def __init__(self, settings: PolicyGradientSettings, plan: UpdatePlan) -> None:
        super().__init__(settings, plan)
        check_corrects(settings.correction, plan)
        self._advantage, self._wants = build_advantage(settings.advantage)
        self._policy_loss, self._selection, self._promises = build_policy_loss(settings.loss)
        self._aggregation = read_aggregation(settings.aggregation)
        self._horizon = float(settings.horizon or plan.max_response_tokens)
        self._kl_coefficient = settings.kl.coefficient
        self._entropy_coefficient = settings.entropy.coefficient
        # Coefficients that the loss of the present batch uses.
        self._kl_weight, self._entropy_bonus = self._kl_coefficient, self._entropy_coefficient
        self._moments = RunningMoments()
        for missing in set(self._wants.needs) - self.provides:
            raise SettingsError(
                "advantage",
                f"{settings.advantage.name!r} needs {missing}, which this algorithm does not provide",
                hint="use ppo or vapo for an estimator with a critic" if missing == "values" else "",
            )
        if self._selection is not None and settings.top_entropy_quantile < 1.0:
            raise SettingsError("top_entropy_quantile", f"cannot be combined with the loss {settings.loss.name!r}")
        self._with_entropy = settings.entropy.coefficient != 0.0 or settings.entropy.target is not None
        self._smoke_test()

    @property
    def needs(self) -> Needs:
        settings, wants = self.settings, self._wants.needs
        with_reference = settings.kl.where != "none" or "reference_log_probs" in wants
        weights = settings.advantage.params.get("weights") if "components" in wants else None
        return Needs(
            roles=(ModelRole("reference"),) if with_reference else (),
            group_size=self._wants.group_size,
            greedy_baseline="baseline_rewards" in wants,
            components=tuple(weights) if isinstance(weights, Mapping) else (),
            entropy_gradient=self._with_entropy,
            selection=self._selection is not None or settings.top_entropy_quantile < 1.0,
        )

    @property
    def silent_without_advantage(self) -> bool:
        return (
            self._promises.silent_without_advantage
            and self.settings.kl.where != "loss"
            and not self.needs.entropy_gradient
            and not self.needs.selection
        )

    def notices(self) -> list[str]:
        settings = self.settings
        if not ratio_is_one(settings.correction, self.plan):
            return []
        target = POLICY_LOSSES.get(settings.loss.name, "loss").target
        idle = idle_loss_settings(self._promises.on_ratio, keyword_settings(target, settings.loss.params))
        return [idle] if idle else []

    def expected_cost(self, group: Group) -> float:
        rewards = group.rewards[group.scored]
        equal = rewards.numel() > 1 and bool((rewards == rewards[0]).all())
        if not (equal and self._silent_where_equal):
            return 1.0
        # A forward and a backward pass take three times a forward pass, and only the latter is left.
        passes = int(self.infers_policy)
        return passes / (passes + 3.0 * self.plan.epochs)

    @property
    def _silent_where_equal(self) -> bool:
        """True if a group with equal scored rewards has no advantage, and so no gradient."""
        settings = self.settings
        return (
            self.silent_without_advantage
            and self._wants.silent_where_equal
            and settings.reward.keeps_equal
            and settings.kl.where == "none"
            and settings.normalize_advantages == "none"
        )

    def group_stage(self, group: Group) -> str | None:
        return filter_group(group, self.settings.filter)

    def batch_stage(self, batch: Batch) -> None:
        settings, rollouts = self.settings, batch.rollouts
        rollouts.rewards, self._moments, metrics = shape_rewards(
            rollouts, settings.reward, self._moments, max_response_tokens=self.plan.max_response_tokens
        )
        batch.report(metrics)
        policy = self._infer_policy(batch) if self.infers_policy else rollouts.behaviour_log_probs
        batch.report(correct_batch(rollouts, settings.correction))
        if any(role.name == "reference" for role in self.needs.roles):
            self._infer_reference(batch, policy)
        if settings.filter.truncated == "mask":
            mask_tokens(batch, "truncated", truncated_keep(rollouts))
        self._estimate(batch, policy)
        self._mask_tokens(batch)
        if settings.correction.mode == "behaviour":
            # From here on it is the anchor: selections see the policy that the loss's ratio refers to.
            rollouts.proximal_log_probs = rollouts.behaviour_log_probs
        if settings.resample.method != "none":
            weights = pf_ppo_weights(rollouts.rewards, settings.resample.method, settings.resample.weight_pow)
            rollouts.repeats = resample(weights, batch.generator)

    def select(self, view: StepView) -> Tensor:
        if self._selection is not None:
            return self._selection(view)
        return top_entropy_selection(view, quantile=self.settings.top_entropy_quantile)

    def loss(self, output: ModelOutput, tokens: TokenBatch, counts: GlobalCounts) -> LossOutput:
        settings = self.settings
        log_probs, entropy = output.policy()
        current = log_probs.detach()
        anchor, weights = anchor_and_weights(current, tokens, settings.correction)
        token_loss, metrics = self._policy_loss(log_probs, anchor, tokens)
        if weights is not None:
            token_loss = token_loss * weights
        if settings.top_entropy_quantile < 1.0 and tokens.selected is not None:
            token_loss = token_loss * tokens.selected
        sums = {"actor/pg_loss": token_loss.detach().sum(), "actor/entropy": entropy.detach().sum()}
        if settings.kl.where == "loss" and tokens.reference_log_probs is not None:
            distance = kl_estimate(log_probs, tokens.reference_log_probs, settings.kl.in_loss)
            if settings.kl.unbiased:
                distance = distance * sampling_ratio(log_probs, tokens.behaviour_log_probs)
            token_loss = token_loss + self._kl_weight * distance
            sums["actor/kl_loss"] = distance.detach().sum()
        if self._with_entropy:
            token_loss = token_loss - self._entropy_bonus * entropy
        share = aggregate(token_loss, tokens, counts, self._aggregation, self._horizon)
        return LossOutput(share, drift_metrics(current, tokens, settings.correction) | metrics | Metrics(sums=sums))

    def state(self) -> dict[str, Any]:
        return {
            "kl_coefficient": self._kl_coefficient,
            "entropy_coefficient": self._entropy_coefficient,
            "reward_moments": self._moments.to_wire(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._kl_coefficient = float(state["kl_coefficient"])
        self._entropy_coefficient = float(state["entropy_coefficient"])
        self._moments = RunningMoments.from_wire(state["reward_moments"])

    @property
    def infers_policy(self) -> bool:
        """True where one more forward pass of the actor is made before the first optimizer step of a batch."""
        settings = self.settings
        return (
            needs_proximal(settings.correction, self.plan)
            or settings.kl.where == "reward"
            or settings.entropy.target is not None
            or settings.off_policy_mask is not None
            or bool({"sum_pi_squared", "proximal_log_probs"} & set(self._wants.needs))
        )

    def _smoke_test(self) -> None:
        """Runs estimator and loss on two short responses, so that mistakes in them show before the run."""
        rollouts = smallest_batch(tuple(self.settings.advantage.params.get("weights", ("a",))))
        self._advantages(rollouts)
        tokens = token_view(rollouts)
        tokens.selected = torch.ones(rollouts.num_tokens)
        log_probs = torch.full((rollouts.num_tokens,), -1.0, requires_grad=True)
        self._policy_loss(log_probs, rollouts.behaviour_log_probs, tokens)

    def _infer_policy(self, batch: Batch) -> Tensor:
        """The current policy's log-probs [R] before the first update: the proximal policy, or its source."""
        settings, rollouts = self.settings, batch.rollouts
        seen = batch.infer("actor", sum_pi_squared="sum_pi_squared" in self._wants.needs)
        log_probs, entropy = seen.policy()
        rollouts.sum_pi_squared = seen.sum_pi_squared
        kind = settings.correction.proximal
        rollouts.proximal_log_probs = log_probs
        if kind != "recompute":
            rollouts.proximal_log_probs = interpolated_proximal(
                log_probs, rollouts.behaviour_log_probs, rollouts.staleness + 1, kind
            )
        if settings.entropy.target is not None and entropy.numel():
            mean = float(entropy.mean())
            self._entropy_bonus = applied_entropy_coefficient(self._entropy_coefficient, mean, settings.entropy)
            batch.report({"actor/entropy_coef": self._entropy_bonus})
            self._entropy_coefficient = next_entropy_coefficient(self._entropy_coefficient, mean, settings.entropy)
        return log_probs

    def _infer_reference(self, batch: Batch, policy: Tensor) -> None:
        """Reference log-probs, KL in the reward, and the adaptive coefficient.

        The coefficient of this batch is the one from before it.
        """
        kl, rollouts = self.settings.kl, batch.rollouts
        if rollouts.reference_log_probs is None:
            rollouts.reference_log_probs, _ = batch.infer("reference").policy()
        if kl.where == "none":
            return
        estimator = kl.in_reward if kl.where == "reward" else kl.in_loss
        distance = kl_estimate(policy, rollouts.reference_log_probs, estimator)
        self._kl_weight = self._kl_coefficient
        if kl.where == "reward":
            penalty = kl_rewards(policy, rollouts.reference_log_probs, kl, self._kl_weight)
            rollouts.token_rewards = penalty if rollouts.token_rewards is None else rollouts.token_rewards + penalty
        mean = float(distance.mean()) if distance.numel() else 0.0
        batch.report({"actor/reference_kl": mean, "actor/kl_coef": self._kl_weight})
        if kl.target is not None:
            self._kl_coefficient = next_coefficient(
                self._kl_coefficient, mean, rollouts.num_sequences, target=kl.target, horizon=kl.horizon
            )

    def _estimate(self, batch: Batch, policy: Tensor) -> None:
        rollouts = batch.rollouts
        estimate = self._estimate_advantages(batch, policy)
        values, rollouts.returns = estimate.advantages, estimate.returns
        if self.settings.normalize_advantages == "batch":
            values = whiten(values, keep=rollouts.keep)
        rollouts.advantages = values
        batch.report(distribution("critic/advantages", values) | distribution("critic/rewards", rollouts.rewards))

    def _estimate_advantages(self, batch: Batch, policy: Tensor) -> Estimate:  # noqa: ARG002 - distillation reads it
        """The advantages of a batch, per token.

        Args:
            batch: corrected, its rewards shaped.
            policy: float [R], log-probs of the policy before the first update, or of the behaviour policy.
        """
        return self._advantages(batch.rollouts)

    def _advantages(self, rollouts: Rollouts) -> Estimate:
        """The estimator's advantages, per token.

        Raises:
            SettingsError: it gave a tensor of another size than it declares by its kind.
        """
        found = self._advantage(rollouts)
        if isinstance(found, Estimate):
            values, size = found.advantages, rollouts.num_tokens
        else:
            values, size = found, rollouts.num_sequences
        if values.shape != (size,):
            raise SettingsError(
                "advantage",
                f"{self.settings.advantage.name!r} gave {tuple(values.shape)} values for {rollouts.num_sequences} "
                f"responses with {rollouts.num_tokens} trained tokens",
                hint="an estimator returns a tensor with one value per response, or an Estimate with one per token",
            )
        return found if isinstance(found, Estimate) else Estimate(rollouts.per_token(found))

    def _mask_tokens(self, batch: Batch) -> None:
        """Masks tokens that are not trained for their advantage."""
        settings, rollouts = self.settings, batch.rollouts
        if settings.off_policy_mask is not None:
            assert rollouts.proximal_log_probs is not None
            keep = off_policy_sequence_keep(rollouts.proximal_log_probs, token_view(rollouts), settings.off_policy_mask)
            mask_tokens(batch, "off_policy", keep)
        if settings.filter.reject_advantages is not None:
            mask_tokens(batch, "advantage", advantage_keep(rollouts, *settings.filter.reject_advantages))


def mask_tokens(batch: Batch, reason: str, keep: Tensor) -> None:
    """Takes tokens out of a batch, numerator and denominator, and reports their share under the reason."""
    rollouts = batch.rollouts
    batch.report({f"masked/{reason}": float((~keep).double().mean()) if keep.numel() else 0.0})
    rollouts.keep = keep if rollouts.keep is None else rollouts.keep & keep


def token_view(rollouts: Rollouts) -> TokenBatch:
    """The whole batch as one micro-batch."""
    advantages = rollouts.advantages
    return TokenBatch(
        sequence_ids=rollouts.sequence_ids,
        sequence_lengths=rollouts.lengths,
        behaviour_log_probs=rollouts.behaviour_log_probs,
        advantages=torch.zeros_like(rollouts.behaviour_log_probs) if advantages is None else advantages,
        staleness=rollouts.staleness,
        sequence_rewards=rollouts.rewards,
    )


def smallest_batch(components: Sequence[str]) -> Rollouts:
    """Responses of two tokens and of one, with every field that an estimator may read."""
    ones, each, below = torch.ones(2), torch.ones(3), torch.full((3,), -1.0)
    return Rollouts(
        group_ids=torch.zeros(2, dtype=torch.int64),
        rewards=torch.tensor([0.0, 1.0]),
        lengths=torch.tensor([2, 1]),
        behaviour_log_probs=below,
        staleness=torch.zeros(3, dtype=torch.int32),
        truncated=torch.zeros(2, dtype=torch.bool),
        components=dict.fromkeys(components, ones),
        baseline_rewards=ones,
        proximal_log_probs=below,
        reference_log_probs=below,
        values=each,
        sum_pi_squared=each,
        advantages=each,
        extra={"prm_log_probs": below},
    )
