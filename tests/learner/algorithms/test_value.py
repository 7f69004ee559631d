"""The critic's loss."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.learner.algorithms.settings import SettingsError, parse
from rollmesh.learner.algorithms.value import ValueSettings, value_loss

NUMBERS = st.floats(-1e6, 1e6, width=32)


def _tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_by_hand():
    values = _tensor(1.0, 1.0, 1.0, 1.0).requires_grad_()
    # Inside the range; outside, clipping hides an error; outside, clipping would help; huge error.
    old, returns = _tensor(1.2, 0.0, 0.0, 1.0), _tensor(2.0, 1.0, 3.0, 21.0)
    loss, metrics = value_loss(values, old, returns, clip=0.5)
    torch.testing.assert_close(loss, 0.5 * _tensor(1.0, 0.25, 6.25, 400.0))
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    torch.testing.assert_close(gradient, _tensor(-1.0, 0.0, 0.0, -20.0))
    assert metrics.sums["critic/vf_clipfrac"] == 2
    assert metrics.sums["critic/vf_outside"] == 2
    assert metrics.sums["critic/vpred_mean"] == 4
    assert metrics.sums["critic/vf_loss"] == loss.sum()


def test_huber_is_linear_beyond_delta():
    values = _tensor(0.0, 0.0).requires_grad_()
    loss, _ = value_loss(values, _tensor(0.0, 0.0), _tensor(2.0, 20.0), clip=None, kind="huber", huber_delta=10.0)
    torch.testing.assert_close(loss, _tensor(2.0, 150.0))
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    torch.testing.assert_close(gradient, _tensor(-2.0, -10.0))


@given(rows=st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), max_size=6), clip=st.none() | st.floats(1e-3, 10))
def test_finite_and_never_below_the_unclipped_loss(rows, clip):
    values, old, returns = torch.tensor(rows, dtype=torch.float32).reshape(-1, 3).unbind(1)
    values = values.clone().requires_grad_()
    for kind in ("mse", "huber"):
        loss, metrics = value_loss(values, old, returns, clip=clip, kind=kind)
        plain, _ = value_loss(values, old, returns, clip=None, kind=kind)
        (gradient,) = torch.autograd.grad(loss.sum(), values)
        assert (loss >= plain).all(), kind
        assert gradient.isfinite().all(), kind
        assert all(value.isfinite() and not value.requires_grad for value in metrics.sums.values()), kind


@pytest.mark.parametrize("values", [{"clip": 0.0}, {"huber_delta": 0}, {"kind": "l1"}])
def test_settings_out_of_range_are_refused(values):
    with pytest.raises(SettingsError):
        parse(ValueSettings, values)
