"""Properties of every registered estimator.

All of them see the same batches: to draw one costs more than to estimate its advantages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollmesh.learner.algorithms.registry import ADVANTAGES, build_advantage
from rollmesh.learner.algorithms.settings import Component, SettingsError
from rollmesh.learner.algorithms.types import Rollouts
from tests.learner.algorithms.advantages.batches import VARIANTS, batches, make_rollouts, run, shuffled, variant_name


def estimates(rollouts: Rollouts) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, advantages and returns of every variant."""
    for variant in VARIANTS:
        yield variant_name(variant), *run(variant, rollouts)


def assert_finite_at_every_token(rollouts: Rollouts, dtype: torch.dtype) -> None:
    for name, *both in estimates(rollouts):
        for values in both:
            assert values.shape == (rollouts.num_tokens,), name
            assert values.dtype == dtype, name
            assert values.isfinite().all(), name


@given(data=st.data())
@settings(max_examples=15)
def test_ragged_batches_have_finite_advantages_in_any_order_of_their_sequences(data: st.DataObject):
    rollouts = data.draw(batches())
    assert_finite_at_every_token(rollouts, torch.float64)
    order = data.draw(st.permutations(range(rollouts.num_sequences)))
    other, places = shuffled(rollouts, list(order))
    for (name, *expected), (_, *found) in zip(estimates(rollouts), estimates(other), strict=True):
        for one, another in zip(expected, found, strict=True):
            assert torch.allclose(another, one[places], rtol=1e-8, atol=1e-9), name


DEGENERATE = {
    "nothing": ([], []),
    "no token": ([0, 0, 0], [0, 0, 1]),
    "one token": ([1], [0]),
    "groups of one": ([3, 1, 2], [2, 0, 1]),
    "an unused group id": ([2, 2], [3, 3]),
    "empty beside long": ([0, 300, 1, 0], [0, 0, 1, 1]),
}


@pytest.mark.parametrize("shape", DEGENERATE.values(), ids=DEGENERATE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_degenerate_shapes_stay_finite(shape: tuple[list[int], list[int]], dtype: torch.dtype):
    assert_finite_at_every_token(make_rollouts(*shape, dtype=dtype), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_impossible_tokens_and_huge_ratios_stay_finite(dtype: torch.dtype):
    rollouts = make_rollouts([4, 300, 2, 3], [0, 0, 1, 1], dtype=dtype)
    assert rollouts.proximal_log_probs is not None
    assert rollouts.reference_log_probs is not None
    rollouts.behaviour_log_probs[:3] = -torch.inf
    rollouts.behaviour_log_probs[4:304] = -80.0
    rollouts.proximal_log_probs[2:4] = -torch.inf
    rollouts.proximal_log_probs[4:304] = 0.0
    rollouts.reference_log_probs[1:4] = -torch.inf
    rollouts.extra["prm_log_probs"][3:6] = -torch.inf
    assert_finite_at_every_token(rollouts, dtype)


def test_equal_rewards_without_token_rewards_stay_finite():
    rollouts = make_rollouts([2, 3, 1, 4], [0, 0, 1, 1], dtype=torch.float32)
    rollouts.rewards = torch.full((4,), 0.7)
    rollouts.token_rewards = None
    rollouts.components = {name: torch.full((4,), 0.7) for name in rollouts.components}
    assert_finite_at_every_token(rollouts, torch.float32)


@pytest.mark.parametrize(
    "name", ["grpo", "grpo_passk", "rloo", "gpg", "opo", "max_rl", "gdpo", "reinforce_plus_plus_baseline"]
)
@pytest.mark.parametrize("members", [2, 3, 7])
def test_groups_that_agree_have_advantages_of_exactly_zero(name: str, members: int):
    """Also in float32, where the mean of equal numbers is not always that number."""
    rollouts = make_rollouts([3] * members, [0] * members, dtype=torch.float32)
    rollouts.rewards, rollouts.token_rewards = torch.full((members,), 0.1), None
    rollouts.components = {"correct": torch.full((members,), 0.1), "style": torch.full((members,), 1.7)}
    advantages, _ = run((name, {}), rollouts)
    assert not advantages.any()


def test_float32_agrees_with_float64():
    rollouts = make_rollouts([3, 5, 0, 40, 7, 2, 6], [0, 1, 0, 1, 0, 2, 1], seed=3)
    narrow = dataclasses.replace(
        rollouts,
        **{
            field.name: value.float()
            for field in dataclasses.fields(rollouts)
            if isinstance(value := getattr(rollouts, field.name), torch.Tensor) and value.is_floating_point()
        },
        components={name: value.float() for name, value in rollouts.components.items()},
        extra={name: value.float() for name, value in rollouts.extra.items()},
    )
    for (name, *expected), (_, *found) in zip(estimates(rollouts), estimates(narrow), strict=True):
        for one, another in zip(expected, found, strict=True):
            assert torch.allclose(another.double(), one, rtol=2e-4, atol=2e-4), name


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"])
def test_rejected_tokens_do_not_move_the_others(name: str):
    rollouts = make_rollouts([4, 4, 4, 4], [0, 0, 1, 1])
    rollouts.keep = torch.ones(16, dtype=torch.bool)
    rollouts.keep[[3, 9]] = False
    kept = run((name, {}), rollouts)[0][rollouts.keep]
    torch.testing.assert_close(kept.mean(), torch.tensor(0.0, dtype=torch.float64), atol=1e-7, rtol=0)
    torch.testing.assert_close(kept.var(), torch.tensor(1.0, dtype=torch.float64), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ADVANTAGES.names)
def test_every_estimator_says_what_it_computes_and_where_it_is_from(name: str):
    text = ADVANTAGES.get(name, "advantage").target.__doc__ or ""
    assert "Returns:" in text
    assert "arXiv" in text or "Williams" in text or name == "grpo_length_penalty"


def test_settings_come_from_the_configuration():
    estimate, traits = build_advantage(Component("gdpo", {"weights": {"style": 2}, "whiten": "none"}))
    assert traits.needs == ("components",)
    rollouts = make_rollouts([1, 1], [0, 0])
    rollouts.components["style"] = torch.tensor([0.0, 1.0], dtype=torch.float64)
    advantages = estimate(rollouts)
    assert isinstance(advantages, torch.Tensor)
    torch.testing.assert_close(advantages, torch.tensor([-1.0, 1.0], dtype=torch.float64) * 2**0.5, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("name", "given_settings", "field"),
    [
        ("gdpo", {"weights": {"stile": 1.0}}, "advantage.weights.stile"),
        ("gdpo", {"weights": {}}, "advantage.weights"),
        ("vapo", {"alpha": 0.0}, "advantage.alpha"),
    ],
)
def test_settings_that_make_no_sense_are_named(name: str, given_settings: dict[str, Any], field: str):
    with pytest.raises(SettingsError) as caught:
        run((name, given_settings), make_rollouts([2, 3], [0, 0]))
    assert caught.value.field == field


def test_prime_without_its_reward_model_says_what_to_do():
    rollouts = make_rollouts([2, 3], [0, 0])
    rollouts.extra.clear()
    with pytest.raises(SettingsError) as caught:
        run(("prime", {}), rollouts)
    assert "algorithm: prime" in caught.value.hint
