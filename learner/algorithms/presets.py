"""The algorithms by their usual names: each a preset of settings over one of four dataflows.

A preset says only what distinguishes it. Everything else is the default of `PolicyGradientSettings`: truncated
importance sampling against the behaviour policy, PPO's clip, no KL term.

The policy that anchors the ratio is the paper's. Where the ratio itself is the correction (a weight, a gate, a pull,
the ratio of a whole response), it is the behaviour policy: `correction: {mode: behaviour}`. Where it only bounds how
far a batch moves the policy (PPO's clip), it is the proximal one, and importance weights correct (arXiv:2110.00641).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rollmesh.learner.algorithms.dataflows.actor_critic import ActorCritic
from rollmesh.learner.algorithms.dataflows.distillation import Distillation
from rollmesh.learner.algorithms.dataflows.policy_gradient import PolicyGradient
from rollmesh.learner.algorithms.dataflows.process_rewards import Prime
from rollmesh.learner.algorithms.registry import register_algorithm


@register_algorithm("policy_gradient")
class Plain(PolicyGradient):
    """The dataflow without any preset: name your own advantage and loss."""


@register_algorithm("grpo")
class GRPO(PolicyGradient):
    """Group relative policy optimization: the group's mean and deviation are the baseline.

    arXiv:2402.03300, eq. 3. The paper's KL term is `kl: {where: loss, coefficient: 0.04}`; it is off here, as it is
    in most later work. verl aggregates by `token_mean`.
    """

    defaults: ClassVar[Mapping[str, Any]] = {"advantage": "grpo", "loss": "ppo", "aggregation": "seq_mean_token_mean"}


@register_algorithm("dr_grpo")
class DrGRPO(PolicyGradient):
    """GRPO done right: no division by the deviation, nor by the length of a response. arXiv:2503.20783, sec. 3.2."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "advantage": {"name": "grpo", "normalize_by_std": False},
        "loss": "ppo",
        "aggregation": "seq_mean_token_sum_norm",
    }


@register_algorithm("dapo")
class DAPO(PolicyGradient):
    """Decoupled clip and dynamic sampling: a higher upper bound, groups without variance are replaced.

    arXiv:2503.14476, eq. 8 to 12: clip-higher, dynamic sampling, token-level loss. The paper's soft overlong
    punishment (eq. 13) is `reward: {overlong_buffer_tokens: ...}`, a fifth of the longest response there.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "advantage": "grpo",
        "loss": {"name": "ppo", "clip_low": 0.2, "clip_high": 0.28},
        "aggregation": "token_mean",
        "filter": {"zero_variance": True},
    }


@register_algorithm("bnpo")
class BNPO(PolicyGradient):
    """TRL's `bnpo`: GRPO whose loss is averaged over tokens. Here over the tokens of the whole batch."""

    defaults: ClassVar[Mapping[str, Any]] = {"advantage": "grpo", "loss": "ppo", "aggregation": "token_mean"}


@register_algorithm("grpo_passk")
class GRPOPassK(PolicyGradient):
    """GRPO for pass@k: only the best response of a group is reinforced, by its lead. arXiv:2503.19595."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "advantage": "grpo_passk",
        "loss": "ppo",
        "aggregation": "seq_mean_token_mean",
    }


@register_algorithm("gdpo")
class GDPO(PolicyGradient):
    """Group reward-decoupled normalization: every reward component is normalized in its group. arXiv:2601.05242."""

    defaults: ClassVar[Mapping[str, Any]] = {"advantage": "gdpo", "loss": "ppo", "aggregation": "token_mean"}


@register_algorithm("gspo")
class GSPO(PolicyGradient):
    """Group sequence policy optimization: one ratio per response, clipped tightly. arXiv:2507.18071, eq. 5 to 7."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "advantage": "grpo",
        "loss": {"name": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
        "aggregation": "seq_mean_token_mean",
        "correction": {"mode": "behaviour"},
    }


@register_algorithm("luspo")
class LUSPO(PolicyGradient):
    """Length-unbiased GSPO: responses count by their length. arXiv:2602.05261."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "advantage": "grpo",
        "loss": {"name": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
        "aggregation": "seq_mean_token_sum",
        "correction": {"mode": "behaviour"},
    }


@register_algorithm("gmpo")
class GMPO(PolicyGradient):
    """Geometric-mean policy optimization: the geometric mean of clipped token ratios. arXiv:2507.20673, eq. 4."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "advantage": "grpo",
        "loss": "gmpo",
        "aggregation": "seq_mean_token_mean",
        "correction": {"mode": "behaviour"},
    }


@register_algorithm("cispo")
class CISPO(PolicyGradient):
    """Clipped importance-sampling weights: every token keeps a gradient. MiniMax-M1, arXiv:2506.13585, eq. 4 and 5."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "advantage": "grpo",
        "loss": "cispo",
        "aggregation": "token_mean",
        "correction": {"mode": "behaviour"},
    }


@register_algorithm("sapo")
class SAPO(PolicyGradient):
    """Soft adaptive policy optimization: a smooth gate in place of the clip. arXiv:2511.20347, eq. 4 to 6."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "advantage": "grpo",
        "loss": "sapo",
        "aggregation": "seq_mean_token_mean",
        "correction": {"mode": "behaviour"},
    }


@register_algorithm("vespo")
class VESPO(PolicyGradient):
    """Variational sequence-level soft policy optimization: a smooth kernel of the sequence ratio. arXiv:2602.10693."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "advantage": "grpo",
        "loss": "vespo",
        "aggregation": "token_mean",
        "correction": {"mode": "behaviour"},
    }


@register_algorithm("clip_cov")
class ClipCov(PolicyGradient):
    """GRPO that detaches tokens of high covariance, against entropy collapse. arXiv:2505.22617, eq. 11 and 12."""

    defaults: ClassVar[Mapping[str, Any]] = {"advantage": "grpo", "loss": "clip_cov", "aggregation": "token_mean"}


@register_algorithm("kl_cov")
class KLCov(PolicyGradient):
    """GRPO that penalizes the drift of tokens of high covariance. arXiv:2505.22617, eq. 13."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "advantage": "grpo",
        "loss": "kl_cov",
        "aggregation": "token_mean",
        "correction": {"mode": "behaviour"},
    }


@register_algorithm("dppo_tv")
class DPPOTV(PolicyGradient):
    """Divergence-based PPO: a trust region in total variation in place of the ratio's clip. arXiv:2602.04879."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "advantage": "grpo",
        "loss": "dppo_tv",
        "aggregation": "token_mean",
        "correction": {"mode": "behaviour"},
    }


@register_algorithm("dppo_kl")
class DPPOKL(PolicyGradient):
    """Divergence-based PPO with a binary KL divergence. arXiv:2602.04879."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "advantage": "grpo",
        "loss": "dppo_kl",
        "aggregation": "token_mean",
        "correction": {"mode": "behaviour"},
    }


@register_algorithm("dro")
class DRO(PolicyGradient):
    """Direct reward optimization: a quadratic penalty on the log-ratio. arXiv:2405.19107, eq. 6."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "advantage": "grpo",
        "loss": "dro",
        "aggregation": "token_mean",
        "correction": {"mode": "behaviour"},
    }


@register_algorithm("rloo")
class RLOO(PolicyGradient):
    """REINFORCE leave-one-out: the mean of the other responses is the baseline. arXiv:2402.14740, eq. 8."""

    defaults: ClassVar[Mapping[str, Any]] = {"advantage": "rloo", "loss": "ppo", "aggregation": "token_mean"}


@register_algorithm("remax")
class ReMax(PolicyGradient):
    """REINFORCE with the reward of the greedy response as baseline. arXiv:2310.10505, eq. 4.

    Every group gets one more response, decoded greedily; it is scored and not trained.
    """

    defaults: ClassVar[Mapping[str, Any]] = {"advantage": "remax", "loss": "ppo", "aggregation": "token_mean"}


@register_algorithm("reinforce")
class Reinforce(PolicyGradient):
    """REINFORCE, Williams 1992, without a baseline: for rewards that are centred already."""

    defaults: ClassVar[Mapping[str, Any]] = {"advantage": "reward", "loss": "reinforce", "aggregation": "token_mean"}


@register_algorithm("reinforce_plus_plus")
class ReinforcePlusPlus(PolicyGradient):
    """REINFORCE++: discounted returns, whitened over the batch. arXiv:2501.03262, eq. 4 to 6."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "advantage": "reinforce_plus_plus",
        "loss": "ppo",
        "aggregation": "token_mean",
    }


@register_algorithm("reinforce_plus_plus_baseline")
class ReinforcePlusPlusBaseline(PolicyGradient):
    """REINFORCE++ with the group's mean as baseline. arXiv:2501.03262, sec. 3.2."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "advantage": "reinforce_plus_plus_baseline",
        "loss": "ppo",
        "aggregation": "token_mean",
    }


@register_algorithm("opo")
class OPO(PolicyGradient):
    """On-policy RL with the optimal baseline, the length-weighted mean of the group's rewards. arXiv:2505.23585."""

    defaults: ClassVar[Mapping[str, Any]] = {"advantage": "opo", "loss": "ppo", "aggregation": "token_mean"}


@register_algorithm("gpg")
class GPG(PolicyGradient):
    """Group policy gradient: no ratio, no clip, no reference. arXiv:2504.02546, eq. 5 and 6."""

    defaults: ClassVar[Mapping[str, Any]] = {"advantage": "gpg", "loss": "gpg", "aggregation": "token_mean"}


@register_algorithm("optimal_token_baseline")
class OptimalTokenBaseline(PolicyGradient):
    """A baseline per token that minimizes the gradient's variance. arXiv:2602.07078."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "advantage": "optimal_token_baseline",
        "loss": "ppo",
        "aggregation": "token_mean",
    }


@register_algorithm("decoupled_ppo")
class DecoupledPPO(PolicyGradient):
    """Decoupled PPO: the clip anchors at a recomputed proximal policy, weights correct for the behaviour policy.

    arXiv:2110.00641, eq. 3, as in AReaL, arXiv:2505.24298, eq. 5. `correction.proximal: loglinear` interpolates the
    proximal policy in place of the forward pass.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "advantage": "grpo",
        "loss": "ppo",
        "aggregation": "token_mean",
        "correction": {"mode": "truncated_is", "proximal": "recompute"},
    }


@register_algorithm("ppo")
class PPO(ActorCritic):
    """Proximal policy optimization with a critic and generalized advantage estimation. arXiv:1707.06347, 1506.02438."""

    defaults: ClassVar[Mapping[str, Any]] = {"advantage": "gae", "loss": "ppo", "aggregation": "token_mean"}


@register_algorithm("vtrace")
class VTrace(ActorCritic):
    """Actor-critic with V-trace targets: clipped ratios correct values and advantages. IMPALA, arXiv:1802.01561.

    The advantages carry their importance weight already, so nothing else weighs the tokens.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "advantage": "vtrace",
        "loss": "reinforce",
        "aggregation": "token_mean",
        "correction": {"mode": "behaviour"},
    }


@register_algorithm("pf_ppo")
class PFPPO(ActorCritic):
    """Policy filtration for PPO: responses are resampled by the reliability of their reward. arXiv:2409.06957."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "advantage": "gae",
        "loss": "ppo",
        "aggregation": "token_mean",
        "resample": {"method": "pow"},
    }


@register_algorithm("vapo")
class VAPO(ActorCritic):
    """Value-based augmented PPO. arXiv:2504.05118.

    Decoupled and length-adaptive lambda, value pretraining, clip-higher, token-level loss, and a language-model loss
    on correct responses.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "advantage": "vapo",
        "loss": {"name": "ppo", "clip_low": 0.2, "clip_high": 0.28},
        "aggregation": "token_mean",
        "critic_warmup": 50,
        "positive_lm_coefficient": 0.1,
    }


@register_algorithm("prime")
class PRIME(Prime):
    """Process reinforcement through implicit rewards: a reward model learns online from outcomes. arXiv:2502.01456."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "advantage": "prime",
        "loss": "ppo",
        "aggregation": "token_mean",
        "filter": {"accuracy_low": 0.2, "accuracy_high": 0.8},
    }


@register_algorithm("on_policy_distillation")
class OnPolicyDistillation(Distillation):
    """On-policy distillation: the reverse KL to one or several teachers, on the student's own responses.

    GKD, arXiv:2306.13649, sec. 3, with the reverse KL of MiniLLM, arXiv:2306.08543, eq. 1, as an advantage of every
    token (Thinking Machines, "On-Policy Distillation", 2025). Full distributions of the teachers are not compared.
    """

    defaults: ClassVar[Mapping[str, Any]] = {"loss": "ppo", "aggregation": "token_mean"}
