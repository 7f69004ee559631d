"""Metrics of a batch: worked examples, and that every one is finite."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.learner.algorithms.correction import (
    CorrectionSettings,
    diagnostics,
    kept_metrics,
    rejections,
    rule_metrics,
    weight_metrics,
)
from rollmesh.learner.algorithms.correction.settings import RULES

LOG_PROB = st.one_of(st.floats(-20.0, 0.0), st.sampled_from([-math.inf, math.nan, -1e9]))
TWO = torch.tensor([0, 0, 1])


def logs(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def test_equal_policies_have_no_distance():
    found = diagnostics(logs(0.5, 0.25, 0.125), logs(0.5, 0.25, 0.125), TWO, 2)
    assert {name: found[name] for name in ("kl", "k3_kl", "chi2_token", "chi2_seq", "log_ppl_diff")} == {
        "kl": 0.0, "k3_kl": 0.0, "chi2_token": 0.0, "chi2_seq": 0.0, "log_ppl_diff": 0.0
    }  # fmt: skip
    assert found["ppl_ratio"] == 1.0
    assert found["training_ppl"] == pytest.approx((math.sqrt(8.0) + 8.0) / 2)


def test_distances_of_a_worked_example():
    found = diagnostics(logs(0.5, 0.5, 0.1), logs(0.25, 0.5, 0.2), TWO, 2)
    log2 = math.log(2.0)
    assert found["kl"] == pytest.approx(0.0)
    assert found["k3_kl"] == pytest.approx((2.0 - 1.0 - log2 + 0.5 - 1.0 + log2) / 3)
    assert found["chi2_token"] == pytest.approx((4.0 + 1.0 + 0.25) / 3 - 1.0)
    assert found["chi2_seq"] == pytest.approx((4.0 + 0.25) / 2 - 1.0)
    assert found["log_ppl_diff_max"] == pytest.approx(log2)
    assert found["log_ppl_diff_min"] == pytest.approx(-log2 / 2)
    assert found["log_ppl_abs_diff"] == pytest.approx(0.75 * log2)


def test_effective_sample_size_is_the_share_of_tokens_that_count():
    # Weights 4, 0, 0 (masked): one of three tokens counts.
    settings = CorrectionSettings(mode="masked_is", floor=0.9, cap=5.0)
    found = weight_metrics(logs(0.8, 0.1, 0.01), logs(0.2, 0.2, 0.2), TWO, 2, settings)
    assert found["rollout_is_eff_sample_size"] == pytest.approx(1.0 / 3.0)
    assert found["rollout_is_oob_ratio"] == pytest.approx(2.0 / 3.0)
    assert found["rollout_is_seq_mean"] == pytest.approx(1.0)
    none_left = weight_metrics(logs(0.1, 0.1, 0.1), logs(0.9, 0.9, 0.9), TWO, 2, settings)
    assert none_left["rollout_is_eff_sample_size"] == 0.0


def test_shares_of_rejected_tokens_and_sequences_by_reason():
    kept = {"a": torch.tensor([True, False, True]), "b": torch.tensor([False, True, True])}
    found = kept_metrics(kept, TWO, 3)
    assert found == pytest.approx(
        {
            "rollout_rs_a_masked_fraction": 1 / 3,
            "rollout_rs_a_seq_masked_fraction": 1 / 2,
            "rollout_rs_b_masked_fraction": 1 / 3,
            "rollout_rs_b_seq_masked_fraction": 1 / 2,
            "rollout_rs_masked_fraction": 2 / 3,
            "rollout_rs_seq_masked_fraction": 1 / 3,
        }
    )


@given(
    st.lists(st.integers(0, 4), max_size=5),
    st.sampled_from(["truncated_is", "masked_is"]),
    st.sampled_from(["token", "sequence", "geometric"]),
    st.sampled_from([1.0, 2.0, math.inf]),
    st.data(),
)
def test_every_figure_is_finite(lengths: list[int], mode, level, cap: float, data: st.DataObject):
    total = sum(lengths)
    train, rollout = (torch.tensor(data.draw(st.lists(LOG_PROB, min_size=total, max_size=total))) for _ in range(2))
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    settings = CorrectionSettings(
        mode=mode, level=level, cap=cap, normalize=True, reject=dict.fromkeys(RULES, 1.5), veto=0.1
    )
    kept = rejections(train, rollout, torch.zeros_like(ids), ids, len(lengths), settings)
    batch = (train, rollout, ids, len(lengths))
    metrics = diagnostics(*batch) | weight_metrics(*batch, settings) | rule_metrics(*batch, settings)
    metrics |= kept_metrics(kept, ids, len(lengths))
    assert bool(metrics) == (total > 0)
    assert [name for name, value in metrics.items() if not math.isfinite(value)] == []
