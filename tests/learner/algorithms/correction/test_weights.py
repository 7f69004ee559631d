"""Importance weights: from their definitions, their invariances, and that they stay finite and constant."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rollmesh.learner.algorithms.correction import (
    CorrectionSettings,
    importance_weights,
    interpolated_proximal,
    rejections,
)

RECORDS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "correction.json").read_text(encoding="utf-8")
)
LEVELS = ("token", "sequence", "geometric")
ANY_LOG_PROB = st.one_of(st.floats(-30.0, 0.0), st.sampled_from([-math.inf, -1e6, 0.0, math.nan]))


def ids_of(lengths: list[int]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))


@st.composite
def batches(draw: st.DrawFn, log_prob: st.SearchStrategy[float]) -> tuple[Tensor, Tensor, list[int]]:
    lengths = draw(st.lists(st.integers(0, 5), max_size=5))
    total = sum(lengths)
    columns = [draw(st.lists(log_prob, min_size=total, max_size=total)) for _ in range(2)]
    proximal, behaviour = (torch.tensor(column, dtype=torch.float64) for column in columns)
    return proximal, behaviour, lengths


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: f"cap{record['cap']}-veto{record['veto']}")
def test_geometric_weights_and_veto_agree_with_their_definitions(record: dict[str, Any]):
    settings = CorrectionSettings(
        mode="masked_is" if record["masked"] else "truncated_is",
        level="geometric",
        cap=record["cap"],
        floor=record["floor"],
        normalize=record["normalized"],
        veto=record["veto"],
    )
    ids = ids_of(record["lengths"])
    proximal, behaviour = (torch.tensor(record[name], dtype=torch.float64) for name in ("proximal", "behaviour"))
    rows = len(record["lengths"])
    weights = importance_weights(proximal, behaviour, ids, rows, settings)
    torch.testing.assert_close(weights, torch.tensor(record["weights"], dtype=torch.float64), rtol=1e-12, atol=1e-12)
    kept = rejections(proximal, behaviour, torch.zeros_like(ids), ids, rows, settings)
    assert kept["veto"].tolist() == record["keep"]


def test_the_levels_of_one_sequence():
    proximal, behaviour = torch.log(torch.tensor([[0.8, 0.2], [0.4, 0.4]], dtype=torch.float64))
    expected = {"token": [2.0, 0.5], "sequence": [1.0, 1.0], "geometric": [1.0, 1.0]}
    for level, weights in expected.items():
        found = importance_weights(
            proximal, behaviour, torch.zeros(2, dtype=torch.int64), 1, CorrectionSettings(level=level, cap=4.0)
        )
        torch.testing.assert_close(found, torch.tensor(weights, dtype=torch.float64))


@given(batches(ANY_LOG_PROB), st.sampled_from(LEVELS), st.sampled_from(["truncated_is", "masked_is"]), st.booleans())
def test_finite_bounded_and_without_gradient_whatever_the_log_probs(batch, level, mode, normalize):
    proximal, behaviour, lengths = batch
    settings = CorrectionSettings(mode=mode, level=level, cap=3.0, floor=0.25, normalize=normalize)
    for dtype in (torch.float32, torch.float64):
        current = proximal.to(dtype).requires_grad_()
        weights = importance_weights(current, behaviour.to(dtype), ids_of(lengths), len(lengths), settings)
        assert not weights.requires_grad
        assert weights.dtype == dtype
        assert torch.isfinite(weights).all()
        if not normalize:
            assert ((weights <= 3.0) & ((weights >= 0.25) | ((weights == 0.0) & (mode == "masked_is")))).all()


@given(batches(st.floats(-5.0, 0.0)), st.sampled_from(LEVELS), st.floats(-1.0, 1.0))
def test_weights_see_only_the_ratio(batch, level, shift):
    proximal, behaviour, lengths = batch
    settings = CorrectionSettings(level=level)
    before = importance_weights(proximal, behaviour, ids_of(lengths), len(lengths), settings)
    after = importance_weights(proximal + shift, behaviour + shift, ids_of(lengths), len(lengths), settings)
    torch.testing.assert_close(after, before)


@given(batches(st.floats(-2.0, 0.0)), st.floats(-1.0, 1.0))
def test_normalized_weights_have_mean_one_and_forget_a_common_factor(batch, shift):
    proximal, behaviour, lengths = batch
    ids = ids_of(lengths)
    settings = CorrectionSettings(cap=math.inf, normalize=True)
    weights = importance_weights(proximal, behaviour, ids, len(lengths), settings)
    torch.testing.assert_close(importance_weights(proximal + shift, behaviour, ids, len(lengths), settings), weights)
    if weights.numel():
        assert float(weights.mean()) == pytest.approx(1.0)


@given(batches(st.floats(-2.0, 0.0)))
def test_a_geometric_weight_does_not_change_when_the_sequence_is_said_twice(batch):
    proximal, behaviour, lengths = batch
    ids = ids_of(lengths)
    doubled, order = torch.cat((ids, ids)).sort(stable=True)
    twice = [torch.cat((column, column))[order] for column in (proximal, behaviour)]
    settings = CorrectionSettings(level="geometric")
    once = importance_weights(proximal, behaviour, ids, len(lengths), settings)
    again = importance_weights(twice[0], twice[1], doubled, len(lengths), settings)
    torch.testing.assert_close(again, torch.cat((once, once))[order])


def test_a_behaviour_log_prob_that_was_not_recorded_weighs_one():
    settings = CorrectionSettings(cap=8.0)
    found = importance_weights(
        torch.tensor([-1.0, -math.inf, -1.0]),
        torch.tensor([-math.inf, -1.0, -1.0]),
        torch.zeros(3, dtype=torch.int64),
        1,
        settings,
    )
    assert found.tolist() == pytest.approx([1.0, 0.0, 1.0], abs=1e-6)


def test_the_interpolated_proximal_policy_nears_the_current_one_with_age():
    current, behaviour = torch.tensor([-1.0]).double(), torch.tensor([-3.0]).double()
    ages = [0, 1, 2, 4, 1000]
    shares = [0.0, 0.0, 0.5, 0.75, 0.999]
    for age, share in zip(ages, shares, strict=True):
        found = interpolated_proximal(current, behaviour, torch.tensor([age]), "loglinear")
        assert float(found) == pytest.approx(-3.0 + 2.0 * share)
        linear = interpolated_proximal(current, behaviour, torch.tensor([age]), "linear")
        assert float(linear.exp()) == pytest.approx((1 - share) * math.exp(-3.0) + share * math.exp(-1.0), abs=1e-9)
    assert torch.equal(interpolated_proximal(current, behaviour, torch.tensor([5]), "behaviour"), behaviour)
    with pytest.raises(ValueError, match="recompute"):
        interpolated_proximal(current, behaviour, torch.tensor([5]), "recompute")


@given(batches(ANY_LOG_PROB), st.sampled_from(["loglinear", "linear", "behaviour"]), st.integers(0, 5))
def test_interpolation_is_finite_whatever_the_log_probs(batch, kind, age):
    current, behaviour, _ = batch
    found = interpolated_proximal(current, behaviour, torch.full(current.shape, age), kind)
    assert torch.isfinite(found).all()
