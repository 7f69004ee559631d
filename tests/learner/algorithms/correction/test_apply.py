"""The correction in a batch and in the loss of a micro-batch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rollmesh.learner.algorithms.correction import (
    CorrectionSettings,
    anchor_and_weights,
    correct_batch,
    drift_metrics,
    importance_weights,
)
from rollmesh.learner.algorithms.metrics import summarize
from rollmesh.learner.algorithms.types import Rollouts, TokenBatch


def make_rollouts(lengths: list[int], seed: int = 0, **fields: Any) -> Rollouts:
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    behaviour = -torch.rand(total, generator=generator)
    return Rollouts(
        group_ids=torch.arange(len(lengths)),
        rewards=torch.zeros(len(lengths)),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        behaviour_log_probs=behaviour,
        staleness=torch.randint(0, 4, (total,), generator=generator, dtype=torch.int32),
        truncated=torch.zeros(len(lengths), dtype=torch.bool),
        **fields,
    )


def with_proximal(rollouts: Rollouts, seed: int = 1) -> Rollouts:
    noise = torch.randn(rollouts.num_tokens, generator=torch.Generator().manual_seed(seed))
    rollouts.proximal_log_probs = rollouts.behaviour_log_probs + 0.3 * noise
    return rollouts


def as_tokens(rollouts: Rollouts, first: int = 0, last: int | None = None) -> TokenBatch:
    """Sequences first .. last of a batch as a micro-batch."""
    ids = rollouts.sequence_ids
    chosen = (ids >= first) & (ids < (rollouts.num_sequences if last is None else last))

    def cut(values: Tensor | None) -> Any:
        return None if values is None else values[chosen]

    return TokenBatch(
        sequence_ids=ids[chosen] - first,
        sequence_lengths=rollouts.lengths[first:last],
        behaviour_log_probs=rollouts.behaviour_log_probs[chosen],
        advantages=torch.ones(int(chosen.sum())),
        staleness=rollouts.staleness[chosen],
        sequence_rewards=rollouts.rewards[first:last],
        proximal_log_probs=cut(rollouts.proximal_log_probs),
        importance_weights=cut(rollouts.importance_weights),
    )


def test_a_batch_gets_weights_rejected_tokens_and_metrics():
    rollouts = with_proximal(make_rollouts([4, 0, 6, 3]))
    settings = CorrectionSettings(reject={"token_k2": 0.02}, max_age=2, veto=0.01)
    metrics = correct_batch(rollouts, settings)
    assert rollouts.importance_weights is not None
    assert rollouts.keep is not None
    expected = (rollouts.staleness <= 2) & (
        (rollouts.proximal_log_probs - rollouts.behaviour_log_probs).square() / 2 <= 0.02
    )
    assert torch.equal(rollouts.keep, expected)
    share = 1.0 - float(expected.double().mean())
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(share)
    assert metrics["masked/max_age"] == pytest.approx(float((rollouts.staleness > 2).double().mean()))
    assert metrics["masked/veto"] == 0.0
    assert {"rollout_corr/k3_kl", "rollout_corr/rollout_is_mean", "rollout_corr/chi2_seq"} <= set(metrics)


def test_what_others_have_left_out_stays_out():
    rollouts = with_proximal(make_rollouts([3, 3]))
    rollouts.keep = torch.tensor([False, True, True, True, True, True])
    correct_batch(rollouts, CorrectionSettings(reject={"token_k2": 1e9}))
    assert rollouts.keep.tolist() == [False, True, True, True, True, True]


def test_nothing_to_reject_leaves_keep_alone():
    rollouts = with_proximal(make_rollouts([3]))
    correct_batch(rollouts, CorrectionSettings())
    assert rollouts.keep is None


def test_age_needs_no_log_probs():
    rollouts = make_rollouts([5, 5])
    metrics = correct_batch(rollouts, CorrectionSettings(max_age=0))
    assert rollouts.keep is not None
    assert torch.equal(rollouts.keep, rollouts.staleness == 0)
    assert rollouts.importance_weights is None
    assert "masked/max_age" in metrics


@pytest.mark.parametrize("mode", ["behaviour", "none"])
def test_modes_without_weights(mode: Any):
    rollouts = with_proximal(make_rollouts([3, 2]))
    correct_batch(rollouts, CorrectionSettings(mode=mode))
    assert rollouts.importance_weights is None
    tokens = as_tokens(rollouts)
    anchor, weights = anchor_and_weights(torch.zeros(5), tokens, CorrectionSettings(mode=mode))
    assert weights is None
    expected = tokens.behaviour_log_probs if mode == "behaviour" else tokens.proximal_log_probs
    assert expected is not None
    assert torch.equal(anchor, expected)


def test_with_one_step_the_current_policy_anchors_and_weighs():
    rollouts = make_rollouts([3, 2])
    current = (rollouts.behaviour_log_probs + 0.1).requires_grad_()
    anchor, weights = anchor_and_weights(current, as_tokens(rollouts), CorrectionSettings())
    assert torch.equal(anchor, current)
    assert not anchor.requires_grad
    assert weights is not None
    assert not weights.requires_grad
    torch.testing.assert_close(weights, torch.full((5,), math.exp(0.1)))


def test_an_interpolated_proximal_policy_splits_the_ratio():
    rollouts = make_rollouts([6])
    rollouts.staleness = torch.tensor([0, 1, 1, 2, 3, 0], dtype=torch.int32)
    current = rollouts.behaviour_log_probs + 0.4
    settings = CorrectionSettings(proximal="loglinear", cap=9.0)
    anchor, weights = anchor_and_weights(current, as_tokens(rollouts), settings)
    # A token of s versions before this one lies s + 1 versions before the one being made.
    share = rollouts.staleness / (rollouts.staleness + 1.0)
    torch.testing.assert_close(anchor, rollouts.behaviour_log_probs + 0.4 * share)
    assert weights is not None
    torch.testing.assert_close(weights, torch.exp(0.4 * share))


def test_normalized_weights_are_never_made_of_a_part():
    rollouts = make_rollouts([3])
    with pytest.raises(ValueError, match="batch stage"):
        anchor_and_weights(torch.zeros(3), as_tokens(rollouts), CorrectionSettings(normalize=True))


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=6),
    st.sampled_from(["token", "sequence", "geometric"]),
    st.sampled_from(["recompute", "loglinear", "linear"]),
    st.data(),
)
def test_weights_and_metrics_do_not_depend_on_the_split(lengths: list[int], level, proximal, data: st.DataObject):
    cut = data.draw(st.integers(0, len(lengths)))
    rollouts = make_rollouts(lengths)
    settings = CorrectionSettings(level=level, cap=1.1, proximal=proximal)
    current = rollouts.behaviour_log_probs + 0.2 * torch.sin(torch.arange(rollouts.num_tokens))
    ids = rollouts.sequence_ids
    whole = as_tokens(rollouts)
    anchor, weights = anchor_and_weights(current, whole, settings)
    assert weights is not None
    torch.testing.assert_close(
        weights, importance_weights(anchor, rollouts.behaviour_log_probs, ids, len(lengths), settings)
    )
    parts = [(as_tokens(rollouts, 0, cut), current[ids < cut]), (as_tokens(rollouts, cut), current[ids >= cut])]
    split = [anchor_and_weights(log_probs, tokens, settings) for tokens, log_probs in parts]
    torch.testing.assert_close(torch.cat([part[0] for part in split]), anchor)
    torch.testing.assert_close(torch.cat([part[1] for part in split]), weights)  # type: ignore[misc]
    together = summarize([drift_metrics(current, whole, settings)], rollouts.num_tokens)
    apart = summarize([drift_metrics(log_probs, tokens, settings) for tokens, log_probs in parts], rollouts.num_tokens)
    assert together == pytest.approx(apart, abs=1e-5)


def test_the_drift_of_a_micro_batch():
    rollouts = make_rollouts([2, 2])
    rollouts.staleness = torch.tensor([0, 1, 1, 4], dtype=torch.int32)
    current = rollouts.behaviour_log_probs + torch.tensor([0.0, math.log(4.0), 0.0, -math.log(2.0)])
    metrics = summarize([drift_metrics(current, as_tokens(rollouts), CorrectionSettings(floor=0.6))], 4)
    assert metrics["staleness/mean"] == pytest.approx(1.5)
    assert metrics["staleness/max"] == 4.0
    assert metrics["rollout_corr/truncated_fraction"] == pytest.approx(0.5)
    assert metrics["rollout_corr/kl"] == pytest.approx(-math.log(2.0) / 4)
    assert metrics["rollout_corr/ratio/mean"] == pytest.approx(6.5 / 4)
    assert metrics["rollout_corr/ratio/ess"] == pytest.approx(6.5**2 / (4 * (1 + 16 + 1 + 0.25)))
    assert metrics["rollout_corr/log_ratio_max"] == pytest.approx(math.log(4.0))
    assert metrics["rollout_corr/ratio/p50"] == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("value", [-math.inf, 0.0, -1e9, math.nan])
def test_metrics_of_impossible_tokens_are_finite(value: float):
    for lengths in ([], [0], [3]):
        rollouts = make_rollouts(lengths)
        current = torch.full((rollouts.num_tokens,), value)
        metrics = summarize([drift_metrics(current, as_tokens(rollouts), CorrectionSettings())], rollouts.num_tokens)
        assert [name for name, value in metrics.items() if not math.isfinite(value)] == []
        rollouts.proximal_log_probs = current
        settings = CorrectionSettings(reject={"seq_max_k2": 0.1}, veto=1e-3, second_moment=0.1, normalize=True)
        assert all(math.isfinite(value) for value in correct_batch(rollouts, settings).values())
