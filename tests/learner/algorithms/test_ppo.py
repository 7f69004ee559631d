"""Advantages, policy loss, aggregation and correction against hand-made references and recorded numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.algorithms.advantages import grpo, reward
from learner.algorithms.aggregation import AGGREGATIONS, aggregate, read_aggregation
from learner.algorithms.correction import CorrectionSettings, correct
from learner.algorithms.load import load_algorithm
from learner.algorithms.metrics import summarize
from learner.algorithms.policy_losses import ppo
from learner.algorithms.settings import SettingsError
from learner.algorithms.types import GlobalCounts, Group, TokenBatch, UpdatePlan

GOLDEN = Path(__file__).parent / "golden"
CASES = json.loads((GOLDEN / "cases.json").read_text())


def group_of(rewards: list[float], scored: list[bool] | None = None) -> Group:
    count = len(rewards)
    return Group(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        scored=torch.tensor(scored or [True] * count),
        lengths=torch.ones(count, dtype=torch.int64),
    )


def flat(mask: np.ndarray, **values: np.ndarray) -> tuple[TokenBatch, dict[str, torch.Tensor]]:
    """[B, T] arrays with a mask -> the trained tokens of each row, side by side."""
    chosen = mask.astype(bool)
    tensors = {name: torch.from_numpy(value)[torch.from_numpy(chosen)] for name, value in values.items()}
    rows = np.nonzero(chosen)[0]
    zeros = torch.zeros(len(rows), dtype=torch.float64)
    batch = TokenBatch(
        sequence_ids=torch.from_numpy(rows),
        sequence_lengths=torch.from_numpy(chosen.sum(1)),
        behaviour_log_probs=zeros,
        advantages=tensors.get("advantages", zeros),
        staleness=zeros.int(),
    )
    return batch, tensors


def counts_of(mask: np.ndarray) -> GlobalCounts:
    return GlobalCounts(int(mask.sum()), int((mask.sum(1) > 0).sum()))


def cases(*prefixes: str):
    return [
        pytest.param(case, np.load(GOLDEN / case["file"]), id=case["id"])
        for case in CASES
        if case["id"].startswith(prefixes)
    ]


@pytest.mark.parametrize(("case", "data"), cases("A_advantage.verl.grpo"))
def test_group_advantages_match_recorded_numbers(case, data):
    settings = case["hyperparameters"]
    mask, scores = data["in_response_mask"], data["in_token_level_rewards"].sum(1)
    for index in np.unique(data["in_index"]):
        rows = np.nonzero(data["in_index"] == index)[0]
        found = grpo(
            Group(torch.from_numpy(scores[rows]), torch.ones(len(rows), dtype=torch.bool), torch.ones(len(rows))),
            normalize_by_std=settings["norm_adv_by_std_in_grpo"],
            epsilon=settings["epsilon"],
        )
        expected = data["out_advantages"][rows]
        rtol, atol = case["suggested_tolerance"]
        np.testing.assert_allclose(torch.stack(list(found)).numpy()[:, None] * mask[rows], expected, rtol, atol)


@pytest.mark.parametrize(("case", "data"), cases("B_policy_loss.verl.vanilla"))
def test_clipped_loss_matches_recorded_numbers(case, data):
    settings, mask = case["hyperparameters"], data["in_response_mask"]
    batch, tensors = flat(mask, advantages=data["in_advantages"], old=data["in_old_log_prob"], new=data["in_log_prob"])
    log_probs = tensors["new"].requires_grad_()
    token_loss, metrics = ppo(
        log_probs,
        tensors["old"],
        batch,
        clip_low=settings["clip_ratio_low"],
        clip_high=settings["clip_ratio_high"],
        dual_clip=settings["clip_ratio_c"],
    )
    if "in_rollout_is_weights" in data:
        token_loss = token_loss * torch.from_numpy(data["in_rollout_is_weights"])[torch.from_numpy(mask.astype(bool))]
    mode = read_aggregation(settings["loss_agg_mode"])
    loss = aggregate(token_loss, batch, counts_of(mask), mode, horizon=mask.shape[1])
    loss.backward()
    rtol, atol = case["suggested_tolerance"]
    np.testing.assert_allclose(loss.detach().numpy(), data["out_loss"], rtol, atol)
    np.testing.assert_allclose(log_probs.grad.numpy(), data["out_grad_log_prob"][mask.astype(bool)], rtol, atol)
    recorded = dict(zip(case["metric_names"], data["out_metrics"], strict=True))
    share = float(metrics.sums["policy/clip_fraction"]) / mask.sum()
    assert share == pytest.approx(recorded["actor/pg_clipfrac"], rel=1e-6)
    lower = float(metrics.sums["policy/dual_clip_fraction"]) / mask.sum()
    assert lower == pytest.approx(recorded["actor/pg_clipfrac_lower"], rel=1e-6)


@pytest.mark.parametrize(("case", "data"), cases("B_loss_aggregation.verl"))
def test_aggregation_matches_recorded_numbers(case, data):
    mask = data["in_loss_mask"]
    batch, tensors = flat(mask, loss=data["in_loss_mat"])
    mode = read_aggregation(case["hyperparameters"]["loss_agg_mode"])
    horizon = case["hyperparameters"]["loss_scale_factor"] or mask.shape[1]
    loss = aggregate(tensors["loss"], batch, counts_of(mask), mode, horizon)
    rtol, atol = case["suggested_tolerance"]
    np.testing.assert_allclose(loss.numpy(), data["out_loss"], rtol, atol)


def test_unscored_members_are_left_out():
    found = torch.stack(list(grpo(group_of([1.0, 99.0, 3.0], [True, False, True]), normalize_by_std=False)))
    assert found.tolist() == [-1.0, 0.0, 1.0]
    assert torch.stack(list(reward(group_of([1.0, 99.0], [True, False])))).tolist() == [1.0, 0.0]


def test_a_group_without_differences_has_no_advantage():
    assert torch.stack(list(grpo(group_of([1.0, 1.0, 1.0])))).tolist() == [0.0, 0.0, 0.0]


@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    mode=st.sampled_from(AGGREGATIONS),
    seed=st.integers(0, 1000),
)
def test_shares_of_micro_batches_add_up(lengths, mode, seed):
    rng = np.random.default_rng(seed)
    mask = (np.arange(5)[None] < np.array(lengths)[:, None]).astype(np.float64)
    values = rng.normal(size=mask.shape)
    counts = counts_of(mask)
    batch, tensors = flat(mask, loss=values)
    whole = float(aggregate(tensors["loss"], batch, counts, mode, 5.0))
    parts = 0.0
    for row in range(len(lengths)):
        part, part_tensors = flat(mask[row : row + 1], loss=values[row : row + 1])
        parts += float(aggregate(part_tensors["loss"], part, counts, mode, 5.0))
    assert parts == pytest.approx(whole, rel=1e-9, abs=1e-12)


def stale_tokens(drift: list[float], proximal: list[float] | None = None) -> tuple[torch.Tensor, TokenBatch]:
    log_probs = torch.full((len(drift),), -1.0)
    return log_probs, TokenBatch(
        sequence_ids=torch.zeros(len(drift), dtype=torch.int64),
        sequence_lengths=torch.tensor([len(drift)]),
        behaviour_log_probs=log_probs - torch.tensor(drift),
        advantages=torch.ones(len(drift)),
        staleness=torch.ones(len(drift), dtype=torch.int32),
        proximal_log_probs=None if proximal is None else torch.tensor(proximal),
    )


def test_truncated_weights_are_capped_ratios_of_the_proximal_policy():
    log_probs, tokens = stale_tokens([0.0, 0.5, 5.0, -5.0])
    anchor, weights, metrics = correct(log_probs, tokens, CorrectionSettings())
    assert anchor is log_probs
    torch.testing.assert_close(weights, torch.tensor([1.0, np.exp(0.5), 2.0, np.exp(-5.0)], dtype=torch.float32))
    figures = summarize([metrics], tokens=4)
    ratios = np.exp([0.0, 0.5, 5.0, -5.0])
    assert figures["off_policy/weight/ess"] == pytest.approx(ratios.sum() ** 2 / (4 * (ratios**2).sum()), rel=1e-5)
    assert figures["off_policy/truncated_fraction"] == 0.25
    assert figures["off_policy/k3_kl"] == pytest.approx(np.mean(ratios - 1 - np.log(ratios)), rel=1e-5)
    assert figures["off_policy/log_ratio_max"] == 5.0


def test_a_proximal_policy_of_its_own_anchors_and_weighs():
    log_probs, tokens = stale_tokens([1.0, 1.0], proximal=[-2.0, -1.5])
    anchor, weights, _ = correct(log_probs, tokens, CorrectionSettings())
    assert anchor is tokens.proximal_log_probs
    torch.testing.assert_close(weights, torch.tensor([1.0, np.exp(0.5)], dtype=torch.float32))


def test_behaviour_mode_anchors_at_the_behaviour_policy():
    log_probs, tokens = stale_tokens([0.3])
    anchor, weights, _ = correct(log_probs, tokens, CorrectionSettings(mode="behaviour"))
    assert anchor is tokens.behaviour_log_probs
    assert weights is None


class Batch:
    """A batch whose actor answers with fixed log-probs and counts how often it is asked."""

    def __init__(self, tokens: TokenBatch) -> None:
        self.tokens = [tokens]
        self.asked: list[str] = []

    def log_probs(self, role: str) -> list[torch.Tensor]:
        self.asked.append(role)
        return [torch.full((self.tokens[0].num_tokens,), -0.5)]


@pytest.mark.parametrize(
    ("plan", "mode", "asked"),
    [
        (UpdatePlan(max_staleness=4), "truncated_is", []),
        (UpdatePlan(minibatches=2, max_staleness=4), "truncated_is", ["actor"]),
        (UpdatePlan(epochs=2, max_staleness=4), "behaviour", []),
    ],
)
def test_the_extra_forward_is_made_only_where_it_is_needed(plan, mode, asked):
    algorithm = load_algorithm("grpo", {"correction": {"mode": mode}}, plan)
    batch = Batch(stale_tokens([0.0, 1.0])[1])
    algorithm.batch_stage(batch)
    assert batch.asked == asked
    assert (batch.tokens[0].proximal_log_probs is not None) == bool(asked)


def test_default_loss_is_the_truncated_policy_gradient():
    algorithm = load_algorithm("grpo", {}, UpdatePlan(max_staleness=4))
    log_probs, tokens = stale_tokens([0.0, 5.0])
    log_probs.requires_grad_()
    algorithm.loss(log_probs, torch.zeros(2), tokens, GlobalCounts(2, 1)).loss.backward()
    # d/dlogp of -w A exp(logp - sg(logp)) / N
    assert log_probs.grad.tolist() == pytest.approx([-0.5, -1.0])


def test_quantiles_of_the_ratio_come_from_all_parts():
    drifts = torch.linspace(-1.0, 1.0, 1001)
    parts = []
    for chunk in (drifts[:100], drifts[100:]):
        log_probs, tokens = stale_tokens(chunk.tolist())
        parts.append(correct(log_probs, tokens, CorrectionSettings())[2])
    figures = summarize(parts, tokens=1001)
    assert figures["off_policy/ratio/p50"] == pytest.approx(1.0, rel=0.02)
    assert figures["off_policy/ratio/p99"] == pytest.approx(np.exp(0.98), rel=0.02)
    assert figures["off_policy/ratio/p01"] == pytest.approx(np.exp(-0.98), rel=0.02)


@pytest.mark.parametrize(("name", "field"), [("token-median", "aggregation"), ("", "aggregation")])
def test_unknown_aggregation_is_named(name, field):
    with pytest.raises(SettingsError, match=field):
        read_aggregation(name)
