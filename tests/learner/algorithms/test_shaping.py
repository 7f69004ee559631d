"""Reward shaping: penalties of length, scale, clip, normalization, and the metrics of each."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.learner.algorithms.penalties import cosine, shortest_correct, soft_overlong
from rollmesh.learner.algorithms.settings import SettingsError, parse
from rollmesh.learner.algorithms.shaping import RewardSettings, RunningMoments, shape_rewards
from rollmesh.learner.algorithms.types import Rollouts

REWARDS = st.lists(st.tuples(st.floats(-1e4, 1e4, width=32), st.integers(0, 40), st.integers(0, 2)), max_size=12)
ALL_SETTINGS = [
    RewardSettings(),
    RewardSettings(overlong_buffer_tokens=8, truncation_penalty=0.5, bias=-0.5, scale=3.0, clip=1.0),
    RewardSettings(length_reward="shortest_correct", normalize="batch"),
    RewardSettings(length_reward="cosine", normalize="running"),
]


def _batch(rewards: list[float], lengths: list[int], groups: list[int] | None = None, truncated=None) -> Rollouts:
    total = sum(lengths)
    return Rollouts(
        group_ids=torch.tensor(groups if groups is not None else [0] * len(rewards), dtype=torch.int64),
        rewards=torch.tensor(rewards, dtype=torch.float32),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        behaviour_log_probs=torch.zeros(total),
        staleness=torch.zeros(total, dtype=torch.int32),
        truncated=torch.tensor(truncated or [False] * len(rewards), dtype=torch.bool),
    )


@given(rows=REWARDS)
def test_finite_whatever_the_batch(rows):
    batch = _batch([r for r, _, _ in rows], [n for _, n, _ in rows], [g for _, _, g in rows])
    before = batch.rewards.clone()
    for settings in ALL_SETTINGS:
        shaped, moments, metrics = shape_rewards(batch, settings, RunningMoments(), max_response_tokens=32)
        assert shaped.shape == before.shape, settings
        assert shaped.dtype == torch.float32, settings
        assert shaped.isfinite().all(), settings
        assert torch.equal(batch.rewards, before), settings
        assert all(value == value for value in metrics.values()), settings
        assert moments.count == (len(rows) if settings.normalize == "running" else 0)


def test_by_default_nothing_changes():
    batch = _batch([1.0, -3.0], [1, 2])
    shaped, _, metrics = shape_rewards(batch, RewardSettings(), RunningMoments(), max_response_tokens=8)
    assert shaped.tolist() == [1.0, -3.0]
    assert shaped is not batch.rewards
    assert metrics["reward/raw/mean"] == -1.0
    assert "reward/shaped/mean" not in metrics


def test_order_of_the_operations():
    settings = RewardSettings(overlong_buffer_tokens=10, truncation_penalty=0.25, bias=0.5, scale=2.0, clip=2.0)
    batch = _batch([1.0, 1.0, 0.0], [10, 15, 20], truncated=[False, False, True])
    shaped, _, metrics = shape_rewards(batch, settings, RunningMoments(), max_response_tokens=20)
    # 2 * (1 + 0.5) = 3, cut; 2 * (1 - 0.5 + 0.5); 2 * (0 - 1 - 0.25 + 0.5).
    assert shaped.tolist() == [2.0, 2.0, -1.5]
    assert metrics["reward/clipped"] == pytest.approx(1 / 3)
    assert metrics["reward/overlong_penalty/min"] == -1.0
    assert metrics["reward/truncation_penalty/mean"] == pytest.approx(-0.25 / 3)
    assert metrics["reward/shaped/max"] == 2.0


def test_soft_overlong_by_hand():
    lengths = torch.tensor([0, 14, 15, 17, 20, 30])
    penalty = soft_overlong(lengths, max_response_tokens=20, buffer_tokens=6, factor=2.0)
    expected = torch.tensor([0, 0, -2 / 6, -1, -2, -2], dtype=torch.float64)
    torch.testing.assert_close(penalty, expected)
    assert (soft_overlong(lengths, max_response_tokens=20, buffer_tokens=0) == 0).all()


def test_shortest_correct_by_hand():
    rewards = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    lengths = torch.tensor([10, 30, 10, 20, 7, 7])
    groups = torch.tensor([0, 0, 0, 0, 1, 1])
    gained = shortest_correct(rewards, lengths, groups)
    # Wrong answers gain nothing by being short; a group of equal lengths gets nothing.
    torch.testing.assert_close(gained, torch.tensor([0.5, -0.5, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64))


def test_cosine_prefers_short_correct_and_long_wrong_answers():
    rewards = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    lengths = torch.tensor([0, 50, 100, 0, 50, 100])
    shaped = cosine(rewards, lengths, max_response_tokens=100)
    torch.testing.assert_close(shaped, torch.tensor([1.0, 0.75, 0.5, -1.0, -0.75, -0.5], dtype=torch.float64))


@given(
    chunks=st.lists(st.lists(st.floats(-1e3, 1e3), max_size=5), min_size=1, max_size=5).filter(
        lambda lists: sum(map(len, lists)) > 1
    )
)
def test_moments_of_parts_are_those_of_the_whole(chunks):
    moments = RunningMoments()
    for chunk in chunks:
        moments = moments.updated(torch.tensor(chunk, dtype=torch.float64))
    whole = torch.tensor([value for chunk in chunks for value in chunk], dtype=torch.float64)
    assert moments.count == whole.numel()
    assert moments.mean == pytest.approx(float(whole.mean()), abs=1e-9)
    assert moments.std == pytest.approx(float(whole.std(correction=0)), abs=1e-6)
    assert RunningMoments.from_wire(json.loads(json.dumps(moments.to_wire()))) == moments


def test_running_normalization_remembers_earlier_batches():
    settings = RewardSettings(normalize="running")
    _, moments, _ = shape_rewards(_batch([0.0, 0.0], [1, 1]), settings, RunningMoments(), max_response_tokens=8)
    shaped, moments, metrics = shape_rewards(_batch([2.0, 2.0], [1, 1]), settings, moments, max_response_tokens=8)
    assert (moments.count, moments.mean, moments.std) == (4, 1.0, 1.0)
    assert shaped.tolist() == [1.0, 1.0]
    assert metrics["reward/running_std"] == 1.0


def test_equal_rewards_are_centred_not_blown_up():
    shaped, _, _ = shape_rewards(
        _batch([0.1] * 7, [1] * 7), RewardSettings(normalize="batch"), RunningMoments(), max_response_tokens=8
    )
    assert shaped.abs().max() < 1e-6


@pytest.mark.parametrize(
    "values", [{"clip": 0}, {"overlong_buffer_tokens": -1}, {"truncation_penalty": -0.5}, {"normalize": "group"}]
)
def test_settings_out_of_range_are_refused(values):
    with pytest.raises(SettingsError):
        parse(RewardSettings, values)
