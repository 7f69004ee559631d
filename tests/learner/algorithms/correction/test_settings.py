"""Settings of the correction: what is refused, and what they ask of a run."""

from __future__ import annotations

import math

import pytest

from rollmesh.learner.algorithms.correction import CorrectionSettings, check_corrects, needs_proximal
from rollmesh.learner.algorithms.settings import SettingsError, parse
from rollmesh.learner.algorithms.types import UpdatePlan


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"cap": 0.5}, "cap"),
        ({"cap": math.nan}, "cap"),
        ({"floor": 1.5}, "floor"),
        ({"veto": 2.0}, "veto"),
        ({"max_age": -1}, "max_age"),
        ({"second_moment": 0.0}, "second_moment"),
        ({"mode": "tis"}, "mode"),
        ({"reject": {"token_k4": 1.0}}, "reject.token_k4"),
        ({"reject": {"token_k1": 0.5}}, "reject.token_k1"),
        ({"reject": {"token_k1": [1.2, 0.8]}}, "reject.token_k1"),
        ({"reject": {"token_k1": None}}, "reject.token_k1"),
        ({"reject": {"seq_max_k2": [0.1, 0.2]}}, "reject.seq_max_k2"),
        ({"reject": {"seq_max_k2": -1}}, "reject.seq_max_k2"),
        ({"reject": [1]}, "reject"),
        ({"proximal": "loglinear", "veto": 1e-4}, "proximal"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(values: dict[str, object], field: str):
    with pytest.raises(SettingsError) as refused:
        parse(CorrectionSettings, values, "algorithm.correction")
    assert refused.value.field == f"algorithm.correction.{field}"


def test_rules_are_read_from_yaml_values_and_from_verls_spelling():
    ours = parse(CorrectionSettings, {"reject": {"token_k1": [0.5, 2], "seq_max_k2": 0.2}})
    theirs = parse(CorrectionSettings, {"reject": {"token_k1": "0.5_2.0", "seq_max_k2": "0.2"}})
    assert ours.rules == theirs.rules
    assert parse(CorrectionSettings, {"reject": {"token_k1": 2.0}}).rules[0] == ours.rules[0]
    assert ours.rules[0].scope == "token"
    assert (ours.rules[0].low, ours.rules[0].high) == pytest.approx((-math.log(2), math.log(2)))
    assert (ours.rules[1].scope, ours.rules[1].divergence, ours.rules[1].high) == ("seq_max", "k2", 0.2)


def test_a_stale_run_that_corrects_for_nothing_is_refused_unless_said_so():
    plan = UpdatePlan(max_staleness=2)
    with pytest.raises(SettingsError, match="corrects for nothing") as refused:
        check_corrects(CorrectionSettings(mode="none"), plan)
    assert "accept_uncorrected" in refused.value.hint
    check_corrects(CorrectionSettings(mode="none", accept_uncorrected=True), plan)
    check_corrects(CorrectionSettings(mode="none"), UpdatePlan(max_staleness=0))
    for mode in ("truncated_is", "masked_is", "behaviour"):
        check_corrects(CorrectionSettings(mode=mode), plan)


@pytest.mark.parametrize(
    ("values", "one_step", "several"),
    [
        ({}, False, True),
        ({"mode": "none"}, False, True),
        ({"mode": "behaviour"}, False, False),
        ({"proximal": "loglinear"}, False, False),
        ({"max_age": 3}, False, True),
        ({"max_age": 3, "level": "sequence"}, True, True),
        ({"veto": 1e-4, "mode": "behaviour"}, True, True),
        ({"reject": {"token_k2": 0.1}}, True, True),
        ({"second_moment": 0.04}, True, True),
        ({"normalize": True}, True, True),
        ({"normalize": True, "mode": "behaviour"}, False, False),
    ],
)
def test_the_extra_forward_pass_is_made_only_where_something_needs_it(
    values: dict[str, object], one_step: bool, several: bool
):
    settings = parse(CorrectionSettings, values)
    assert needs_proximal(settings, UpdatePlan()) is one_step
    assert needs_proximal(settings, UpdatePlan(minibatches=2)) is several
