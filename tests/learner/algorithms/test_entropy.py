"""The coefficient of the entropy bonus, fixed or following a target."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.learner.algorithms.entropy import (
    EntropySettings,
    applied_entropy_coefficient,
    next_entropy_coefficient,
)
from rollmesh.learner.algorithms.settings import SettingsError, parse


@given(coefficient=st.floats(0, 0.1), entropy=st.floats(0, 10))
def test_the_coefficient_steps_towards_the_target_within_its_range(coefficient, entropy):
    settings = EntropySettings(target=0.3, step=0.01, max_coefficient=0.1)
    after = next_entropy_coefficient(coefficient, entropy, settings)
    assert 0 <= after <= 0.1
    assert abs(after - coefficient) <= 0.01 + 1e-12
    assert after >= coefficient if entropy <= 0.3 else after <= coefficient
    assert applied_entropy_coefficient(after, entropy, settings) == (after if entropy <= 0.3 else 0.0)


def test_without_a_target_the_coefficient_stays():
    settings = EntropySettings(coefficient=0.01)
    assert next_entropy_coefficient(0.01, 5.0, settings) == 0.01
    assert applied_entropy_coefficient(0.01, 5.0, settings) == 0.01
    assert next_entropy_coefficient(0.01, math.nan, EntropySettings(target=0.3)) == 0.01


def test_the_bonus_needs_the_gradient_only_where_it_is_used():
    assert not EntropySettings().active
    assert EntropySettings(coefficient=0.01).active
    assert EntropySettings(target=0.2).active


@pytest.mark.parametrize("values", [{"target": 0}, {"step": 0}, {"min_coefficient": 2}])
def test_settings_out_of_range_are_refused(values):
    with pytest.raises(SettingsError):
        parse(EntropySettings, values)
