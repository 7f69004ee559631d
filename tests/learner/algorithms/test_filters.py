"""Filters, by tables."""

from __future__ import annotations

import pytest
import torch

from rollmesh.learner.algorithms.filters import FilterSettings, advantage_keep, filter_group, truncated_keep
from rollmesh.learner.algorithms.settings import SettingsError, parse
from rollmesh.learner.algorithms.types import Group, Rollouts


def _group(rewards, lengths=None, scored=None, **components) -> Group:
    count = len(rewards)
    return Group(
        rewards=torch.tensor(rewards, dtype=torch.float32),
        scored=torch.tensor(scored if scored is not None else [True] * count),
        lengths=torch.tensor(lengths or [10] * count),
        truncated=torch.zeros(count, dtype=torch.bool),
        components={name: torch.tensor(values, dtype=torch.float32) for name, values in components.items()},
    )


BAND = FilterSettings(accuracy_low=0.25, accuracy_high=0.75)
VARIED = FilterSettings(zero_variance=True)
LENGTH = FilterSettings(min_response_tokens=5, max_response_tokens=20)


@pytest.mark.parametrize(
    ("settings", "group", "reason"),
    [
        (FilterSettings(), _group([1, 1, 1]), None),
        (VARIED, _group([1, 1, 1]), "zero_variance"),
        (VARIED, _group([0.1] * 7), "zero_variance"),
        (VARIED, _group([1, 0, 1]), None),
        (VARIED, _group([1]), None),
        # Members without a score do not count.
        (VARIED, _group([1, 1, 0], scored=[True, True, False]), "zero_variance"),
        (VARIED, _group([1, 0, 1], scored=[True, False, False]), None),
        (VARIED, _group([0, 0], scored=[False, False]), "unscored"),
        (BAND, _group([0, 0, 0, 1]), None),
        (BAND, _group([0, 1, 1, 1]), None),
        (BAND, _group([0, 0, 0, 0, 1]), "accuracy_low"),
        (BAND, _group([0, 1, 1, 1, 1]), "accuracy_high"),
        # The reward varies by its format, the metric does not.
        (FilterSettings(zero_variance=True, metric="correct"), _group([1, 1.1], correct=[1, 1]), "zero_variance"),
        (FilterSettings(accuracy_low=0.5, metric="correct"), _group([9, 9], correct=[0, 0.5]), "accuracy_low"),
        (LENGTH, _group([1, 0], lengths=[4, 5]), None),
        (LENGTH, _group([1, 0], lengths=[21, 20]), None),
        (LENGTH, _group([1, 0], lengths=[1, 4]), "response_too_short"),
        (LENGTH, _group([1, 0], lengths=[21, 40]), "response_too_long"),
        (LENGTH, _group([1, 0], lengths=[1, 40]), "response_length"),
        (LENGTH, _group([1, 0], lengths=[10, 40], scored=[False, True]), "response_too_long"),
    ],
)
def test_reasons(settings, group, reason):
    assert filter_group(group, settings) == reason


def test_an_unknown_metric_names_the_known_ones():
    with pytest.raises(SettingsError) as error:
        filter_group(_group([1, 0], format=[1, 0]), FilterSettings(zero_variance=True, metric="acc"))
    assert error.value.hint == "known: reward, format"


def _rollouts(lengths, groups, truncated=None, advantages=None) -> Rollouts:
    total = sum(lengths)
    return Rollouts(
        group_ids=torch.tensor(groups, dtype=torch.int64),
        rewards=torch.zeros(len(lengths)),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        behaviour_log_probs=torch.zeros(total),
        staleness=torch.zeros(total, dtype=torch.int32),
        truncated=torch.tensor(truncated or [False] * len(lengths), dtype=torch.bool),
        advantages=None if advantages is None else torch.tensor(advantages),
    )


def test_tokens_of_truncated_responses_are_left_out():
    assert truncated_keep(_rollouts([2, 0, 1], [0, 0, 0], [True, True, False])).tolist() == [False, False, True]
    assert truncated_keep(_rollouts([], [])).shape == (0,)


def test_groups_whose_advantages_lie_in_the_band_are_left_out():
    batch = _rollouts([1, 2, 1, 1], [0, 1, 1, 0], advantages=[0.0, 0.0, 0.3, 0.1, 0.0])
    assert advantage_keep(batch).tolist() == [False, True, True, True, False]
    assert advantage_keep(batch, 0.0, 0.3).any().item() is False
    assert advantage_keep(batch, -1.0, 0.2).tolist() == [False, True, True, True, False]
    assert advantage_keep(_rollouts([], [], advantages=[])).shape == (0,)


@pytest.mark.parametrize(
    "values",
    [
        {"accuracy_low": 0.8, "accuracy_high": 0.2},
        {"min_response_tokens": 9, "max_response_tokens": 3},
        {"reject_advantages": [0.1]},
        {"reject_advantages": [0.1, -0.1]},
        {"truncated": "drop"},
        {"zero_variance_below": -1},
    ],
)
def test_settings_that_nothing_can_pass_are_refused(values):
    with pytest.raises(SettingsError):
        parse(FilterSettings, values)


def test_a_band_of_advantages_is_read_from_a_list():
    assert parse(FilterSettings, {"reject_advantages": [0, 0.1]}).reject_advantages == (0.0, 0.1)
