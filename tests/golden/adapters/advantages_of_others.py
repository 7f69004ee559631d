"""Advantages of AReaL, TRL, PipelineRL, prime-rl, torchrl and rlax, each in its own layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollmesh.learner.algorithms.advantages import group_relative
from rollmesh.learner.algorithms.advantages.components import combine, gdpo
from rollmesh.learner.algorithms.advantages.moving_baseline import moving_baseline
from rollmesh.learner.algorithms.advantages.normalization import normalize
from rollmesh.learner.algorithms.advantages.returns import following_values, generalized_advantages, lambda_returns
from rollmesh.learner.algorithms.advantages.whitening import whiten
from rollmesh.learner.algorithms.kl import kl_estimate
from rollmesh.learner.algorithms.shaping import RewardSettings, RunningMoments, shape_rewards
from rollmesh.learner.algorithms.types import Estimate, Rollouts
from tests.golden.adapters import adapter
from tests.golden.adapters.advantages import scattered
from tests.golden.case import Case, Outputs

FAMILY = "A_advantage"


# AReaL


def _consecutive(rows: int, size: int) -> tuple[Tensor, int]:
    return torch.arange(rows) // size, -(-rows // size)


@adapter(
    FAMILY,
    "areal",
    "normalization_reward_batch_batch",
    "normalization_reward_group_group",
    "normalization_reward_group_group_biased",
    "normalization_reward_group_None_loo",
    "normalization_reward_group_batch",
    "normalization_reward_batch_None_loo",
)
def areal_rewards(case: Case) -> Outputs:
    settings, rewards = case.settings, case.rows("x")
    groups, count = _consecutive(rewards.numel(), settings["group_size"])
    normalized = normalize(
        rewards,
        groups,
        count,
        mean=settings["mean_level"] or "none",
        std=settings["std_level"] or "none",
        leave_one_out=settings["mean_leave1out"],
        correction=int(settings["std_unbiased"]),
        epsilon=settings["eps"],
        around="subtracted",
        single="reward" if settings["mean_leave1out"] else "zero",
    )
    return {"out_normalized": normalized}


@adapter(FAMILY, "areal", "normalization_adv_batch_masked")
def areal_advantages(case: Case) -> Outputs:
    return {"out_normalized": case.padded(whiten(case.flat("x"), epsilon=case.settings["eps"], guard="deviation"))}


@adapter(FAMILY, "areal", "gae_shifted_kl_reward")
def areal_gae(case: Case) -> Outputs:
    """Everything is indexed by the position that predicts a token; the score stands before a row's last position."""
    settings, attention = case.settings, case.inputs["attention_mask"]
    mask = np.roll(case.inputs["loss_mask"], -1, axis=1)
    trained = mask.astype(bool)
    rows, width = attention.shape
    ends = attention.sum(1)
    rollouts = Rollouts(
        group_ids=torch.arange(rows),
        rewards=_areal_scores(case),
        lengths=torch.from_numpy(trained.sum(1)),
        behaviour_log_probs=torch.zeros(int(trained.sum())),
        staleness=torch.zeros(int(trained.sum()), dtype=torch.int32),
        truncated=torch.from_numpy(ends == width),
    )
    policy = torch.from_numpy(np.roll(case.inputs["logprobs"], -1, axis=1) * mask)
    penalties = -settings["kl_ctl"] * kl_estimate(
        policy, torch.from_numpy(case.inputs["ref_logp"] * mask), settings["kl"], bound=10.0
    )
    penalties[torch.arange(rows), torch.from_numpy(ends - 1)] = 0.0
    scores = (
        torch.where(rollouts.truncated, 0.0, rollouts.rewards)
        if settings["mask_no_eos_with_zero"]
        else rollouts.rewards
    )
    total = penalties.clone()
    total[torch.arange(rows), torch.from_numpy(ends - 2)] += scores
    values = case.rows("values") if "values" in case.inputs else torch.zeros_like(total)
    here = torch.from_numpy(trained)
    flat = values[here]
    advantages = generalized_advantages(
        total[here],
        flat,
        following_values(flat, rollouts.lengths, torch.where(rollouts.truncated, values[:, -1], 0.0)),
        rollouts.lengths,
        discounts=settings["discount"],
        lam=settings["gae_lambda"],
    )
    spread = torch.from_numpy(_carried(trained, advantages))
    return {
        "out_advantages": spread,
        "out_returns": spread + values,
        "out_tot_rewards": total,
        "out_loss_mask_shifted": mask,
    }


def _areal_scores(case: Case) -> Tensor:
    settings = RewardSettings(
        bias=float(case.settings["reward_bias"]),
        scale=case.settings["reward_scaling"],
        clip=case.settings["reward_clip"],
    )
    rewards = case.rollouts(rewards=case.rows("rewards"))
    shaped, _, _ = shape_rewards(rewards, settings, RunningMoments(), max_response_tokens=1)
    return shaped


def _carried(trained: NDArray[np.bool_], advantages: Tensor) -> NDArray[Any]:
    """Off the mask the peer repeats the advantage of the next trained position; 0 after the last, and at the end."""
    result = scattered(trained, advantages)
    for column in range(trained.shape[1] - 2, -1, -1):
        result[:, column] = np.where(trained[:, column], result[:, column], result[:, column + 1])
    result[:, -1] = 0.0
    return result


# TRL


@adapter(
    FAMILY,
    "trl",
    "grpo_sum_then_normalize_group",
    "grpo_sum_then_normalize_batch",
    "grpo_sum_then_normalize_none",
    "grpo_normalize_then_sum_group",
    "grpo_normalize_then_sum_batch",
    "grpo_normalize_then_sum_none",
)
def trl_grpo(case: Case) -> Outputs:
    settings, rewards = case.settings, case.rows("rewards_per_func").T
    groups, _ = _consecutive(rewards.shape[1], settings["num_generations"])
    summed = settings["multi_objective_aggregation"] == "sum_then_normalize"
    weights = rewards.new_tensor(settings["weights"])
    rollouts = Rollouts(
        group_ids=groups,
        rewards=combine(rewards, weights),
        lengths=torch.zeros_like(groups),
        behaviour_log_probs=rewards.new_zeros(0),
        staleness=torch.zeros(0, dtype=torch.int32),
        truncated=torch.zeros_like(groups, dtype=torch.bool),
        components={str(k): row for k, row in enumerate(rewards)},
    )
    if summed:
        level = settings["scale_rewards"]
        result: Tensor | Estimate = group_relative.grpo(
            rollouts,
            normalize_by_std=level != "none",
            std="batch" if level == "batch" else "group",
            epsilon=1e-4,
            single="zero",
        )
    else:
        named = {str(k): weight for k, weight in enumerate(settings["weights"])}
        result = gdpo(rollouts, weights=named, epsilon=1e-4, whiten="sequences", single="zero")
    assert isinstance(result, Tensor)
    return {"out_advantages": result}


# PipelineRL, prime-rl


@adapter(FAMILY, "pipelinerl", "rloo", "rloo_std")
def pipelinerl_rloo(case: Case) -> Outputs:
    advantages = group_relative.rloo(
        _bare(case),
        normalize_by_std=case.settings["divide_advantage_by_std"],
        epsilon=case.settings["eps"],
        single="zero",
    )
    return {"out_advantages": advantages}


def _bare(case: Case, lengths: Tensor | None = None) -> Rollouts:
    """Rewards [S] alone; one group where the case has no index."""
    rewards = case.rows("rewards")
    index = case.inputs.get("index", np.zeros(rewards.numel()))
    lengths = torch.zeros(rewards.numel(), dtype=torch.int64) if lengths is None else lengths
    return Rollouts(
        group_ids=torch.from_numpy(np.unique(index, return_inverse=True)[1].astype(np.int64)),
        rewards=rewards,
        lengths=lengths,
        behaviour_log_probs=rewards.new_zeros(int(lengths.sum())),
        staleness=torch.zeros(int(lengths.sum()), dtype=torch.int32),
        truncated=torch.zeros(rewards.numel(), dtype=torch.bool),
    )


@adapter(FAMILY, "prime-rl", "grpo_center")
def prime_rl_center(case: Case) -> Outputs:
    return {"out_advantages": group_relative.grpo(_bare(case), normalize_by_std=False, single="zero")}


@adapter(FAMILY, "prime-rl", "grpo_length_penalty")
def prime_rl_length_penalty(case: Case) -> Outputs:
    settings, generated = case.settings, case.rows("output_tokens")
    costs = {"w_out": generated, "w_in": case.rows("total_tokens") - generated, "w_turns": case.rows("turns")}
    rollouts = _bare(case)
    rollouts.rewards = group_relative.relative_penalties(
        rollouts.rewards, rollouts.group_ids, 1, list(costs.values()), [settings[name] for name in costs]
    )
    return {"out_advantages": group_relative.grpo(rollouts, normalize_by_std=False, single="zero")}


@adapter(FAMILY, "prime-rl", "max_rl")
def prime_rl_max_rl(case: Case) -> Outputs:
    return {"out_advantages": group_relative.max_rl(_bare(case), epsilon=0.0)}


@adapter(FAMILY, "prime-rl", "rae_ema_baseline")
def prime_rl_moving_baseline(case: Case) -> Outputs:
    rewards, roles = case.rows("rewards"), torch.from_numpy(np.unique(case.inputs["role"], return_inverse=True)[1])
    state = rewards.new_zeros(int(roles.max()) + 1)
    return {"out_advantages": moving_baseline(rewards, roles, state, decay=case.settings["decay"])[0]}


# torchrl [B, T, 1], rlax [B, T]: trajectories that end and are cut in the middle of a row


@adapter(FAMILY, "torchrl", "gae_done_terminated")
def torchrl_gae(case: Case) -> Outputs:
    values, shape = case.rows("value").flatten(), case.inputs["value"].shape
    advantages = generalized_advantages(
        case.rows("reward").flatten(),
        values,
        case.rows("next_value").flatten(),
        torch.full((shape[0],), shape[1]),
        discounts=case.settings["gamma"] * (1 - case.rows("terminated").flatten().to(values.dtype)),
        lam=case.settings["lmbda"],
        continuations=1 - case.rows("done").flatten().to(values.dtype),
    )
    return {"out_advantages": advantages.view(shape), "out_value_targets": (advantages + values).view(shape)}


@adapter(FAMILY, "torchrl", "td_lambda_return")
def torchrl_lambda_returns(case: Case) -> Outputs:
    rewards, shape = case.rows("reward").flatten(), case.inputs["reward"].shape
    returns = lambda_returns(
        rewards,
        case.rows("next_value").flatten(),
        torch.full((shape[0],), shape[1]),
        discounts=case.settings["gamma"] * (1 - case.rows("terminated").flatten().to(rewards.dtype)),
        lam=case.settings["lmbda"],
        continuations=1 - case.rows("done").flatten().to(rewards.dtype),
    )
    return {"out_returns": returns.view(shape)}


@adapter(FAMILY, "rlax", "gae_truncated")
def rlax_gae(case: Case) -> Outputs:
    values, shape = case.rows("values"), case.inputs["r_t"].shape
    advantages = generalized_advantages(
        case.rows("r_t").flatten(),
        values[:, :-1].flatten(),
        values[:, 1:].flatten(),
        torch.full((shape[0],), shape[1]),
        discounts=case.rows("discount_t").flatten(),
        lam=case.settings["lambda"],
    )
    return {"out_advantages": advantages.view(shape)}
