"""Rejection rules: bounds, scopes, and that rejected and kept tokens are the whole batch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rollmesh.learner.algorithms.correction import CorrectionSettings, rejections
from rollmesh.learner.algorithms.correction.rejection import all_keep, within_second_moment
from rollmesh.learner.algorithms.correction.settings import RULES

THRESHOLDS = {"k1": [0.8, 1.25], "k2": 0.05, "k3": 0.05}
EVERYTHING = CorrectionSettings(
    reject={rule: THRESHOLDS[rule[-2:]] for rule in RULES}, veto=0.1, max_age=2, second_moment=0.04
)


def reject(proximal: list[float], behaviour: list[float], lengths: list[int], settings: CorrectionSettings, ages=None):
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    staleness = torch.tensor(ages if ages is not None else [0] * len(proximal), dtype=torch.int32)
    columns = (torch.tensor(column, dtype=torch.float64) for column in (proximal, behaviour))
    return rejections(*columns, staleness, ids, len(lengths), settings)


def ratios_to_logs(ratios: list[float]) -> tuple[list[float], list[float]]:
    """Log-probs of proximal and behaviour with these ratios proximal / behaviour."""
    return [-1.0 + math.log(ratio) for ratio in ratios], [-1.0] * len(ratios)


@pytest.mark.parametrize(
    ("rule", "threshold", "expected"),
    [
        # k1 bounds behaviour / proximal: 1/1.1, 1/2, 1/0.9 | 1/0.5, 1/1
        ("token_k1", [0.8, 1.5], [True, False, True, False, True]),
        ("token_k1", "0.4_3.0", [True, True, True, True, True]),
        ("token_k1", 1.3, [True, False, True, False, True]),
        ("token_k2", 0.1, [True, False, True, False, True]),
        ("token_k3", 0.2, [True, False, True, True, True]),
        ("seq_sum_k1", [0.6, 3.0], [False, False, False, True, True]),
        ("seq_mean_k1", [0.75, 1.3], [True, True, True, False, False]),
        ("seq_mean_k2", 0.1, [True, True, True, False, False]),
        ("seq_sum_k2", 0.242, [False, False, False, True, True]),
        ("seq_max_k1", [0.1, 1.2], [True, True, True, False, False]),
        ("seq_max_k3", 0.2, [False, False, False, True, True]),
    ],
)
def test_a_rule_keeps_what_lies_within_its_bounds(rule: str, threshold: object, expected: list[bool]):
    proximal, behaviour = ratios_to_logs([1.1, 2.0, 0.9, 0.5, 1.0])
    kept = reject(proximal, behaviour, [3, 2], CorrectionSettings(reject={rule: threshold}))
    assert kept[rule].tolist() == expected


def test_one_token_vetoes_its_whole_sequence_and_no_other():
    proximal, behaviour = ratios_to_logs([1.0, 1e-6, 1.0, 1.0, 1e-3])
    kept = reject(proximal, behaviour, [3, 0, 2], CorrectionSettings(veto=1e-4))
    assert kept["veto"].tolist() == [False, False, False, True, True]


def test_age_rejects_tokens_not_sequences():
    kept = reject([-1.0] * 4, [-1.0] * 4, [4], CorrectionSettings(max_age=1), ages=[0, 1, 2, 3])
    assert kept["max_age"].tolist() == [True, True, False, False]


def test_nothing_in_use_rejects_nothing():
    assert reject([-1.0], [-9.0], [1], CorrectionSettings()) == {}


LOG_PROB = st.one_of(st.floats(-20.0, 0.0), st.sampled_from([-math.inf, math.nan, -1e9]))


@given(st.lists(st.integers(0, 4), max_size=5), st.data())
def test_kept_and_rejected_tokens_are_a_partition_for_any_log_probs(lengths: list[int], data: st.DataObject):
    total = sum(lengths)
    columns = [data.draw(st.lists(LOG_PROB, min_size=total, max_size=total)) for _ in range(2)]
    ages = data.draw(st.lists(st.integers(0, 4), min_size=total, max_size=total))
    kept = reject(columns[0], columns[1], lengths, EVERYTHING, ages)
    assert set(kept) == {*RULES, "veto", "max_age", "second_moment"}
    assert all(keep.dtype == torch.bool and keep.shape == (total,) for keep in kept.values())
    together = all_keep(kept)
    assert together is not None
    rejected = torch.zeros(total, dtype=torch.bool)
    for keep in kept.values():
        rejected |= ~keep
    assert torch.equal(together, ~rejected)


@given(st.lists(st.floats(0.0, 4.0), min_size=1, max_size=30), st.floats(0.01, 2.0))
def test_second_moment_keeps_the_most_it_can(squares: list[float], bound: float):
    values = torch.tensor(squares, dtype=torch.float64)
    kept = within_second_moment(values, bound)
    count = int(kept.sum())
    assert count >= 1
    assert values[kept].max() <= (values[~kept].min() if count < len(squares) else math.inf)
    assert count == 1 or float(values[kept].mean()) < bound + 1e-9
    if count < len(squares):
        one_more: Tensor = values.sort().values[: count + 1]
        assert float(one_more.mean()) >= bound - 1e-9


def test_second_moment_of_nothing():
    assert within_second_moment(torch.zeros(0), 0.1).shape == (0,)
