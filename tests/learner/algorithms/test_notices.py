"""A run's notices of settings without effect agree with the gradient, for all algorithms and losses."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.learner.clips import effects
from rollmesh.learner.algorithms.load import load_algorithm
from rollmesh.learner.algorithms.registry import ALGORITHMS, POLICY_LOSSES
from rollmesh.learner.algorithms.types import UpdatePlan

ONE_UPDATE = UpdatePlan(max_staleness=4, max_response_tokens=6, group_size=4, steps=1000)
SEVERAL = dataclasses.replace(ONE_UPDATE, minibatches=4)
CASES = {
    "one update": ({}, ONE_UPDATE),
    "several updates": ({}, SEVERAL),
    "the sampler anchors": ({"correction": {"mode": "behaviour"}}, ONE_UPDATE),
    "the proximal policy is guessed": ({"correction": {"proximal": "loglinear"}}, ONE_UPDATE),
}
BY_THEIR_RATIO = ("cispo", "dppo_kl", "dppo_tv", "dro", "gmpo", "gspo", "kl_cov", "luspo", "sapo", "vespo", "vtrace")


@pytest.mark.parametrize("name", ALGORITHMS.names)
def test_no_setting_of_a_preset_is_dead_in_silence(name: str) -> None:
    found = effects(name, {}, ONE_UPDATE, until_one_acts=True)
    assert [effect for effect in found if not effect.agrees] == []


# The loss does not decide whether the ratio is 1: the rarer cases are tried with two.
COMBINATIONS = [
    (loss, case)
    for case in CASES
    for loss in (POLICY_LOSSES.names if case in ("one update", "the sampler anchors") else ("ppo", "cispo"))
]


@pytest.mark.parametrize(("loss", "case"), COMBINATIONS)
def test_whatever_anchors_a_loss_what_is_said_is_so(loss: str, case: str) -> None:
    params, plan = CASES[case]
    found = effects("policy_gradient", {"loss": loss, **params}, plan, until_one_acts=True)
    assert [effect for effect in found if not effect.agrees] == []


def test_a_ratio_that_is_the_correction_is_to_the_policy_that_sampled() -> None:
    modes = {name: load_algorithm(name, {}, ONE_UPDATE).settings.correction.mode for name in ALGORITHMS.names}
    assert tuple(name for name, mode in modes.items() if mode == "behaviour") == BY_THEIR_RATIO


def test_what_is_said_names_keys_and_ways_out() -> None:
    said = load_algorithm("ppo", {}, ONE_UPDATE).notices()
    assert len(said) == 2
    for key in ("algorithm.loss.clip_low", "algorithm.loss.dual_clip", "learner.batch.minibatches"):
        assert key in said[0]
    assert "two_sided_delta" not in said[0], "it is not in use"
    assert "algorithm.value.clip" in said[1]
    assert load_algorithm("ppo", {}, SEVERAL).notices() == []
