"""Estimators against the papers' sums, written out one row at a time in plain floats."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollmesh.learner.algorithms.advantages.critic import adaptive_lambda, gae, vapo
from rollmesh.learner.algorithms.advantages.group_relative import (
    grpo,
    grpo_length_penalty,
    grpo_passk,
    max_rl,
    opo,
    rloo,
)
from rollmesh.learner.algorithms.advantages.moving_baseline import moving_baseline
from rollmesh.learner.algorithms.advantages.process import prime
from rollmesh.learner.algorithms.advantages.reinforce import remax
from rollmesh.learner.algorithms.advantages.token_baseline import optimal_token_baseline
from rollmesh.learner.algorithms.advantages.vtrace import leaky_clip, vtrace
from rollmesh.learner.algorithms.types import Rollouts
from tests.learner.algorithms.advantages.batches import batches, make_rollouts

CASES = json.loads((Path(__file__).parents[1] / "fixtures" / "vapo_prime.json").read_text(encoding="utf-8"))


def rows(values: Tensor, rollouts: Rollouts) -> list[list[float]]:
    return [row.tolist() for row in values.split(rollouts.lengths.tolist())]


def rewards_by_row(rollouts: Rollouts) -> list[list[float]]:
    assert rollouts.token_rewards is not None
    result = rows(rollouts.token_rewards, rollouts)
    for row, reward in zip(result, rollouts.rewards.tolist(), strict=True):
        if row:
            row[-1] += reward
    return result


def scores(rollouts: Rollouts) -> list[float]:
    """Rewards of whole responses; that of an empty one counts, too."""
    assert rollouts.token_rewards is not None
    tokens = rows(rollouts.token_rewards, rollouts)
    return [reward + sum(row) for reward, row in zip(rollouts.rewards.tolist(), tokens, strict=True)]


def flat(rows_: list[list[float]]) -> Tensor:
    return torch.tensor([value for row in rows_ for value in row], dtype=torch.float64)


def peers(rollouts: Rollouts) -> list[list[int]]:
    """The other members of each sequence's group."""
    groups = rollouts.group_ids.tolist()
    return [[j for j, g in enumerate(groups) if g == group and j != i] for i, group in enumerate(groups)]


@given(rollouts=batches(longest=9), gamma=st.sampled_from([1.0, 0.9]), lam=st.sampled_from([0.0, 0.8, 1.0]))
@settings(max_examples=50)
def test_gae_is_the_sum_of_discounted_errors(rollouts: Rollouts, gamma: float, lam: float):
    assert rollouts.values is not None
    expected, targets = [], []
    for rewards, values in zip(rewards_by_row(rollouts), rows(rollouts.values, rollouts), strict=True):
        following = [*values[1:], 0.0][: len(values)]
        deltas = [r + gamma * n - v for r, v, n in zip(rewards, values, following, strict=True)]
        for t in range(len(rewards)):
            expected.append(sum((gamma * lam) ** (s - t) * deltas[s] for s in range(t, len(rewards))))
            targets.append(expected[-1] + values[t])
    estimate = gae(rollouts, gamma=gamma, lam=lam, whiten=False)
    assert estimate.returns is not None
    torch.testing.assert_close(estimate.advantages, torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(estimate.returns, torch.tensor(targets, dtype=torch.float64))


@given(rollouts=batches())
@settings(max_examples=50)
def test_rloo_subtracts_the_mean_of_the_others(rollouts: Rollouts):
    values = scores(rollouts)
    expected = [
        value - sum(values[j] for j in others) / len(others) if others else value
        for value, others in zip(values, peers(rollouts), strict=True)
    ]
    torch.testing.assert_close(rloo(rollouts), torch.tensor(expected, dtype=torch.float64))
    alone = torch.tensor([not others for others in peers(rollouts)], dtype=torch.bool)
    assert not rloo(rollouts, single="zero")[alone].any()


@given(rollouts=batches())
@settings(max_examples=50)
def test_grpo_standardizes_within_the_group(rollouts: Rollouts):
    values, expected = scores(rollouts), []
    for i, others in enumerate(peers(rollouts)):
        group = [values[j] for j in (i, *others)]
        mean = sum(group) / len(group)
        if others:
            std = math.sqrt(sum((value - mean) ** 2 for value in group) / (len(group) - 1))
            expected.append((values[i] - mean) / (std + 1e-6))
        else:
            expected.append(values[i] / (1.0 + 1e-6))
    torch.testing.assert_close(grpo(rollouts), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-9)


@given(rollouts=batches())
@settings(max_examples=50)
def test_opo_weighs_the_baseline_by_length(rollouts: Rollouts):
    values, lengths, expected = scores(rollouts), rollouts.lengths.tolist(), []
    for i, others in enumerate(peers(rollouts)):
        group = [i, *others]
        total = sum(lengths[j] for j in group)
        if not others:
            expected.append(values[i])
        elif total:
            expected.append(values[i] - sum(lengths[j] * values[j] for j in group) / total)
        else:
            expected.append(values[i] - min(values[j] for j in group))
    torch.testing.assert_close(opo(rollouts), torch.tensor(expected, dtype=torch.float64))


def test_only_the_best_response_counts_for_pass_at_k():
    rollouts = make_rollouts([1] * 6, [0, 0, 0, 1, 1, 2])
    rollouts.rewards, rollouts.token_rewards = torch.tensor([0.2, 1.0, 0.5, 1.0, 1.0, 1.0]), None
    torch.testing.assert_close(
        grpo_passk(rollouts, normalize_by_std=False), torch.tensor([0.0, 0.5, 0.0, 0.0, 0.0, 0.0])
    )


def test_max_rl_divides_by_the_pass_rate():
    rollouts = make_rollouts([1] * 6, [0, 0, 0, 0, 1, 1])
    rollouts.rewards, rollouts.token_rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0]), None
    torch.testing.assert_close(max_rl(rollouts), torch.tensor([3.0, -1.0, -1.0, -1.0, 0.0, 0.0]))


def test_length_costs_only_where_the_prompt_is_solved():
    rollouts = make_rollouts([2, 4, 2, 4], [0, 0, 1, 1])
    rollouts.rewards, rollouts.token_rewards = torch.tensor([1.0, 1.0, 0.0, 0.0]), None
    torch.testing.assert_close(grpo_length_penalty(rollouts, weight=0.2), torch.tensor([0.05, -0.05, 0.0, 0.0]))


@given(rollouts=batches())
@settings(max_examples=30)
def test_remax_subtracts_the_greedy_reward_from_the_reward_to_go(rollouts: Rollouts):
    assert rollouts.baseline_rewards is not None
    expected = [
        sum(row[t:]) - baseline
        for row, baseline in zip(rewards_by_row(rollouts), rollouts.baseline_rewards.tolist(), strict=True)
        for t in range(len(row))
    ]
    torch.testing.assert_close(remax(rollouts).advantages, torch.tensor(expected, dtype=torch.float64))


@given(rollouts=batches())
@settings(max_examples=30)
def test_token_baselines_are_weighted_means_per_position(rollouts: Rollouts):
    assert rollouts.sum_pi_squared is not None
    assert rollouts.proximal_log_probs is not None
    assert rollouts.importance_weights is not None
    rewards, expected = rewards_by_row(rollouts), []
    norms = [
        [w * w * (1 - 2 * math.exp(p) + q) for p, q, w in zip(*each, strict=True)]
        for each in zip(
            rows(rollouts.proximal_log_probs, rollouts),
            rows(rollouts.sum_pi_squared, rollouts),
            rows(rollouts.importance_weights, rollouts),
            strict=True,
        )
    ]
    for i, others in enumerate(peers(rollouts)):
        for t in range(len(rewards[i])):
            there = [j for j in (i, *others) if len(rewards[j]) > t]
            weights = [sum(norms[j][: t + 1]) for j in there]
            returns = [sum(rewards[j][t:]) for j in there]
            alone = len(there) == 1
            top = sum(w * g for w, g in zip(weights, returns, strict=True))
            expected.append(returns[0] - (0.0 if alone else top / (sum(weights) + 1e-8)))
    found = optimal_token_baseline(rollouts).advantages
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-6)


def test_vtrace_on_policy_is_gae_with_lambda_one():
    rollouts = make_rollouts([5, 1, 0, 9], [0, 0, 1, 1])
    rollouts.proximal_log_probs = rollouts.behaviour_log_probs
    plain, trace = gae(rollouts, gamma=0.9, lam=1.0, whiten=False), vtrace(rollouts, gamma=0.9)
    torch.testing.assert_close(trace.advantages, plain.advantages)
    torch.testing.assert_close(trace.returns, plain.returns)


def test_vtrace_ignores_what_follows_an_impossible_token():
    """pi(token) = 0: no error passes it, and the token itself has no advantage."""
    rollouts = make_rollouts([4], [0])
    assert rollouts.proximal_log_probs is not None
    assert rollouts.values is not None
    rollouts.proximal_log_probs[1] = -torch.inf
    estimate = vtrace(rollouts)
    assert estimate.returns is not None
    assert abs(float(estimate.advantages[1])) < 1e-6
    torch.testing.assert_close(estimate.returns[1], rollouts.values[1], rtol=1e-6, atol=1e-6)


def test_a_leaky_clip_lets_a_share_of_the_ratio_through():
    ratios = leaky_clip(torch.tensor([0.5, 3.0]), 1.0, alpha=0.25)
    torch.testing.assert_close(ratios, torch.tensor([0.5, 0.25 + 0.75 * 3.0]))


@given(roles=st.lists(st.integers(0, 2), max_size=12), decay=st.sampled_from([0.0, 0.5, 0.95]))
@settings(max_examples=50)
def test_moving_baselines_follow_their_role(roles: list[int], decay: float):
    generator = torch.Generator().manual_seed(len(roles))
    rewards = torch.randn(len(roles), generator=generator, dtype=torch.float64)
    state = torch.tensor([0.3, -0.1, 0.0, 7.0], dtype=torch.float64)
    baselines, expected = state.tolist(), []
    for reward, role in zip(rewards.tolist(), roles, strict=True):
        expected.append(reward - baselines[role])
        baselines[role] = decay * baselines[role] + (1 - decay) * reward
    advantages, after = moving_baseline(rewards, torch.tensor(roles, dtype=torch.int64), state, decay=decay)
    torch.testing.assert_close(advantages, torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(after, torch.tensor(baselines, dtype=torch.float64))


def test_adaptive_lambda_spreads_errors_over_a_share_of_the_response():
    lam = adaptive_lambda(torch.tensor([0, 1, 19, 20, 40, 1000]), 0.05, torch.float64)
    torch.testing.assert_close(lam, torch.tensor([0.0, 0.0, 0.0, 0.0, 0.5, 0.98], dtype=torch.float64))


def from_fixture(case: dict[str, Any]) -> Rollouts:
    rollouts = make_rollouts([len(row) for row in case["values"]], case["groups"])
    rollouts.rewards = torch.tensor(case["outcomes"], dtype=torch.float64)
    rollouts.token_rewards = flat(case["token_rewards"])
    rollouts.values = flat(case["values"])
    rollouts.reference_log_probs = flat(case["reference_log_probs"])
    rollouts.extra = {"prm_log_probs": flat(case["prm_log_probs"])}
    return rollouts


@pytest.mark.parametrize("case", CASES)
def test_vapo_agrees_with_its_equations(case: dict[str, Any]):
    estimate = vapo(from_fixture(case), gamma=case["gamma"], alpha=case["alpha"])
    torch.testing.assert_close(estimate.advantages, flat(case["vapo_advantages"]), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(estimate.returns, flat(case["vapo_returns"]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_prime_agrees_with_its_equations(case: dict[str, Any]):
    rollouts = from_fixture(case)
    rollouts.token_rewards = None
    estimate = prime(rollouts, beta=case["beta"], gamma=case["gamma"])
    torch.testing.assert_close(estimate.advantages, flat(case["prime_advantages"]), rtol=1e-9, atol=1e-9)
