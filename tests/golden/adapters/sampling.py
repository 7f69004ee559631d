"""Resampling, overlong penalties, filters of groups."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rollmesh.learner.algorithms.dataflows.resampling import pf_ppo_weights
from rollmesh.learner.algorithms.filters import FilterSettings, advantage_keep, filter_group
from rollmesh.learner.algorithms.penalties import soft_overlong
from rollmesh.learner.algorithms.ragged import last_tokens
from rollmesh.learner.algorithms.shaping import RewardSettings, RunningMoments, shape_rewards
from rollmesh.learner.algorithms.types import Group, Rollouts
from tests.golden.adapters import adapter
from tests.golden.case import Case, Outputs


@adapter("D_resampling", "verl", "pf_ppo_pow", "pf_ppo_max_min", "pf_ppo_max_random")
def resampling_weights(case: Case) -> Outputs:
    scores = case.rows("token_level_scores").sum(-1)
    return {"out_weights": pf_ppo_weights(scores, case.settings["reweight_method"], case.settings["weight_pow"])}


def _batch(rewards: Tensor, lengths: Tensor) -> Rollouts:
    total = int(lengths.sum())
    return Rollouts(
        group_ids=torch.arange(rewards.numel()),
        rewards=rewards,
        lengths=lengths,
        behaviour_log_probs=torch.zeros(total, dtype=rewards.dtype),
        staleness=torch.zeros(total, dtype=torch.int32),
        truncated=torch.zeros(rewards.numel(), dtype=torch.bool),
    )


def _shaped(rewards: Tensor, lengths: Tensor, settings: RewardSettings, budget: int) -> Tensor:
    return shape_rewards(_batch(rewards, lengths), settings, RunningMoments(), max_response_tokens=budget)[0]


@adapter("D_overlong", "verl", "dapo_soft_overlong")
def verl_overlong(case: Case) -> Outputs:
    settings = case.settings
    shaping = RewardSettings(
        overlong_buffer_tokens=settings["overlong_buffer_len"], overlong_factor=settings["penalty_factor"]
    )
    lengths, width = case.rows("response_lengths"), settings["max_resp_len"]
    rewards = _shaped(case.rows("scores"), lengths, shaping, width)
    places = torch.zeros(lengths.numel(), width, dtype=rewards.dtype)
    _, sequences = last_tokens(lengths)
    places[sequences, lengths[sequences] - 1] = rewards[sequences]
    return {"out_reward_tensor": places}


@adapter("D_overlong", "areal", "areal_overlong")
def areal_overlong(case: Case) -> Outputs:
    settings = case.settings
    shaping = RewardSettings(
        overlong_buffer_tokens=settings["overlong_tokens"], overlong_factor=settings["overlong_penalty_factor"]
    )
    budget = settings["max_response_length"]
    return {"out_rewards": _shaped(case.rows("rewards"), case.rows("response_lengths"), shaping, budget)}


@adapter("D_overlong", "trl", "soft_overlong_punishment")
def trl_overlong(case: Case) -> Outputs:
    settings = case.settings
    return {
        "out_penalty": soft_overlong(
            case.rows("response_lengths"),
            max_response_tokens=settings["max_completion_len"],
            buffer_tokens=settings["soft_punish_cache"],
        )
    }


def _kept(case: Case, metric: str, settings: FilterSettings) -> Outputs:
    values, index = case.inputs[metric], case.inputs["index"]
    kept = []
    for group_id in np.unique(index):
        rewards = torch.from_numpy(values[index == group_id])
        count = rewards.numel()
        group = Group(
            rewards=rewards,
            scored=torch.ones(count, dtype=torch.bool),
            lengths=torch.ones(count, dtype=torch.int64),
            truncated=torch.zeros(count, dtype=torch.bool),
        )
        kept.append(int(filter_group(group, settings) is None))
    return {"out_group_kept": np.asarray(kept)}


@adapter("D_dynamic_sampling", "verl", "dapo_group_filter")
def dapo_group_filter(case: Case) -> Outputs:
    return _kept(case, "metric", FilterSettings(zero_variance=True, zero_variance_below=0.0))


@adapter("D_dynamic_sampling", "slime", "nonzero_std_filter")
def nonzero_std_filter(case: Case) -> Outputs:
    return _kept(case, "rewards", FilterSettings(zero_variance=True, zero_variance_below=case.settings["threshold"]))


@adapter("D_dynamic_sampling", "prime-rl", "adv_range_gate")
def advantage_range_gate(case: Case) -> Outputs:
    ids, groups = np.unique(case.inputs["index"], return_inverse=True)
    advantages = case.rows("advantages")
    batch = _batch(torch.zeros_like(advantages), torch.ones(advantages.numel(), dtype=torch.int64))
    batch.group_ids, batch.advantages = torch.from_numpy(groups.astype(np.int64)), advantages
    keep = advantage_keep(batch, case.settings["reject_min"], case.settings["reject_max"]).numpy()
    return {"out_group_kept": np.asarray([int(keep[groups == i].any()) for i in range(len(ids))])}
