"""Advantages of verl and slime: estimators over `Rollouts`, and what they are made of."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollmesh.learner.algorithms.advantages import critic, group_relative, reinforce
from rollmesh.learner.algorithms.advantages.components import gdpo
from rollmesh.learner.algorithms.advantages.normalization import is_alone
from rollmesh.learner.algorithms.advantages.returns import following_values, generalized_advantages, rewards_per_token
from rollmesh.learner.algorithms.advantages.token_baseline import (
    optimal_token_baseline,
    squared_gradient_norms,
    token_baselines,
)
from rollmesh.learner.algorithms.advantages.whitening import whiten
from rollmesh.learner.algorithms.kl import kl_estimate
from rollmesh.learner.algorithms.ragged import discounted_returns, running_sums
from rollmesh.learner.algorithms.types import Estimate, Rollouts
from tests.golden.adapters import adapter
from tests.golden.case import Case, Outputs

FAMILY = "A_advantage"


# verl: rewards [B, T]


def _scored(case: Case) -> Rollouts:
    """Rewards summed over a row, as estimators per sequence take them."""
    return case.rollouts(rewards=case.rows("token_level_rewards").sum(1))


def _rewarded(case: Case, **fields: Any) -> Rollouts:
    """Rewards of every token."""
    token_rewards = case.flat("token_level_rewards")
    zeros = torch.zeros(case.lengths.numel(), dtype=token_rewards.dtype)
    return case.rollouts(token_rewards=token_rewards, rewards=zeros, **fields)


def _twice(case: Case, result: Tensor | Estimate) -> Outputs:
    """Without a critic the peer's returns are the advantages."""
    advantages = _padded(case, result)
    return {"out_advantages": advantages, "out_returns": advantages}


def _padded(case: Case, result: Tensor | Estimate) -> NDArray[Any]:
    if isinstance(result, Estimate):
        return case.padded(result.advantages)
    mask = case.mask
    assert mask is not None
    return np.broadcast_to(result.numpy()[:, None], mask.shape)


@adapter(FAMILY, "verl", "grpo", "grpo_nostd", "grpo_vectorized")
def grpo(case: Case) -> Outputs:
    return _twice(
        case,
        group_relative.grpo(
            _scored(case),
            normalize_by_std=case.settings["norm_adv_by_std_in_grpo"],
            epsilon=case.settings["epsilon"],
        ),
    )


@adapter(FAMILY, "verl", "grpo_passk")
def grpo_passk(case: Case) -> Outputs:
    return _twice(
        case,
        group_relative.grpo_passk(
            _scored(case),
            normalize_by_std=case.settings["norm_adv_by_std_in_grpo"],
            epsilon=case.settings["epsilon"],
        ),
    )


@adapter(FAMILY, "verl", "rloo")
def rloo(case: Case) -> Outputs:
    return _twice(case, group_relative.rloo(_scored(case)))


@adapter(FAMILY, "verl", "rloo_vectorized")
def rloo_vectorized(case: Case) -> Outputs:
    return _twice(case, group_relative.rloo(_scored(case), single="zero"))


@adapter(FAMILY, "verl", "opo")
def opo(case: Case) -> Outputs:
    return _twice(case, group_relative.opo(_scored(case)))


@adapter(FAMILY, "verl", "gpg")
def gpg(case: Case) -> Outputs:
    return _twice(case, group_relative.gpg(_scored(case), f_norm=case.settings["f_norm"]))


@adapter(FAMILY, "verl", "reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(case: Case) -> Outputs:
    return _twice(case, reinforce.reinforce_plus_plus_baseline(_scored(case)))


@adapter(FAMILY, "verl", "remax")
def remax(case: Case) -> Outputs:
    rollouts = _rewarded(case, baseline_rewards=case.rows("reward_baselines"))
    returns = discounted_returns(rewards_per_token(rollouts), 1.0, rollouts.lengths)
    return {"out_advantages": _padded(case, reinforce.remax(rollouts)), "out_returns": case.padded(returns)}


@adapter(FAMILY, "verl", "reinforce_plus_plus")
def reinforce_plus_plus(case: Case) -> Outputs:
    rollouts, gamma = _rewarded(case), case.settings["gamma"]
    return {
        "out_advantages": _padded(case, reinforce.reinforce_plus_plus(rollouts, gamma=gamma)),
        "out_returns": _padded(case, reinforce.reinforce_plus_plus(rollouts, gamma=gamma, whiten=False)),
    }


@adapter(FAMILY, "verl", "gae")
def gae(case: Case) -> Outputs:
    rollouts = _rewarded(case, values=case.flat("values"))
    estimate = critic.gae(rollouts, gamma=case.settings["gamma"], lam=case.settings["lam"])
    assert estimate.returns is not None
    return {"out_advantages": case.padded(estimate.advantages), "out_returns": case.padded(estimate.returns)}


@adapter(FAMILY, "verl", "gdpo")
def gdpo_components(case: Case) -> Outputs:
    names = [str(k) for k in range(len(case.inputs["component_rewards"]))]
    components = dict(zip(names, case.rows("component_rewards"), strict=True))
    weights = case.settings["weights"]
    return _twice(
        case,
        gdpo(
            case.rollouts(rewards=components["0"], components=components),
            weights=None if weights is None else dict(zip(names, weights, strict=True)),
            epsilon=case.settings["epsilon"],
        ),
    )


@adapter(FAMILY, "verl", "gdpo_single")
def gdpo_single(case: Case) -> Outputs:
    return _twice(case, gdpo(_scored(case), epsilon=case.settings["epsilon"]))


def _baseline_rollouts(case: Case) -> Rollouts:
    weights = {"importance_weights": case.flat("rollout_is_weights")} if case.settings["use_is_weights"] else {}
    log_probs, squares = case.flat("old_log_prob"), case.flat("sum_pi_squared")
    return _rewarded(case, proximal_log_probs=log_probs, sum_pi_squared=squares, **weights)


@adapter(FAMILY, "verl", "tir_optimal_token_baseline")
def tir_token_baseline(case: Case) -> Outputs:
    rollouts, settings = _baseline_rollouts(case), case.settings
    result = optimal_token_baseline(
        rollouts, handle_zero_tail=settings["handle_zero_tail"], epsilon=settings["epsilon"]
    )
    returns = discounted_returns(rewards_per_token(rollouts), 1.0, rollouts.lengths)
    return {"out_advantages": case.padded(result.advantages), "out_returns": case.padded(returns)}


@adapter(FAMILY, "verl", "optimal_token_baseline")
def padded_token_baseline(case: Case) -> Outputs:
    """Positions are columns, gaps included."""
    rollouts, settings = _baseline_rollouts(case), case.settings
    assert rollouts.proximal_log_probs is not None
    assert rollouts.sum_pi_squared is not None
    norms = squared_gradient_norms(rollouts.proximal_log_probs, rollouts.sum_pi_squared)
    if rollouts.importance_weights is not None:
        norms = norms * rollouts.importance_weights.square()
    returns = discounted_returns(rewards_per_token(rollouts), 1.0, rollouts.lengths)
    assert case.mask is not None
    baselines = token_baselines(
        returns,
        running_sums(norms, rollouts.lengths),
        rollouts,
        alone=is_alone(rollouts.group_ids, rollouts.num_groups),
        handle_zero_tail=settings["handle_zero_tail"],
        epsilon=settings["epsilon"],
        places=torch.from_numpy(np.nonzero(case.mask)[1]),
    )
    return {"out_advantages": case.padded(returns - baselines), "out_returns": case.padded(returns)}


@adapter(FAMILY, "verl", "kl_in_reward")
def kl_in_reward(case: Case) -> Outputs:
    kl = kl_estimate(case.rows("old_log_prob"), case.rows("ref_log_prob"), "k1")
    return {"out_token_level_rewards": case.rows("token_level_scores") - case.settings["kl_ratio"] * kl}


# slime: rows of a given length, gaps in the mask are steps in time


def _whole_rows(case: Case) -> tuple[Rollouts, NDArray[np.bool_]]:
    """Every position up to a row's length is a token; penalties where the mask is 1, the reward at its last one."""
    kl, mask, lengths = case.inputs["kl"], case.inputs["response_mask"] != 0, case.inputs["response_lengths"]
    inside = np.arange(kl.shape[1])[None] < lengths[:, None]
    penalties = torch.from_numpy((-case.settings["kl_coef"] * kl * mask)[inside].astype(kl.dtype))
    count = torch.from_numpy(lengths.astype(np.int64))
    rollouts = Rollouts(
        group_ids=torch.arange(len(lengths)),
        rewards=case.rows("rewards"),
        lengths=count,
        behaviour_log_probs=torch.zeros_like(penalties),
        staleness=torch.zeros(penalties.numel(), dtype=torch.int32),
        truncated=torch.zeros(len(lengths), dtype=torch.bool),
        token_rewards=penalties,
    )
    return rollouts, inside


def scattered(inside: NDArray[np.bool_], values: Tensor) -> NDArray[Any]:
    result = np.zeros(inside.shape, dtype=values.numpy().dtype)
    result[inside] = values.numpy()
    return result


@adapter(FAMILY, "slime", "reinforce_plus_plus_returns")
def slime_returns(case: Case) -> Outputs:
    rollouts, inside = _whole_rows(case)
    result = reinforce.reinforce_plus_plus(rollouts, gamma=case.settings["gamma"], whiten=False)
    return {"out_returns": scattered(inside, result.advantages)}


@adapter(FAMILY, "slime", "reinforce_plus_plus_baseline_unwhitened")
def slime_baseline(case: Case) -> Outputs:
    rollouts, inside = _whole_rows(case)
    result = reinforce.reinforce_plus_plus_baseline(rollouts, whiten=False, token_level=True)
    return {"out_advantages": scattered(inside, result.advantages)}


@adapter(FAMILY, "slime", "gae_vanilla", "gae_chunked")
def slime_gae(case: Case) -> Outputs:
    rewards, values = case.rows("token_level_rewards"), case.rows("values")
    lengths = torch.full((len(values),), values.shape[1])
    flat = values.reshape(-1)
    advantages = generalized_advantages(
        rewards.reshape(-1),
        flat,
        following_values(flat, lengths),
        lengths,
        discounts=case.settings["gamma"],
        lam=case.settings["lambd"],
    ).view(values.shape)
    return {"out_advantages": advantages, "out_returns": advantages + values}


@adapter(FAMILY, "slime", "masked_whiten")
def slime_whiten(case: Case) -> Outputs:
    return {"out_whitened": case.padded(whiten(case.flat("x"), epsilon=case.settings["epsilon"]))}
