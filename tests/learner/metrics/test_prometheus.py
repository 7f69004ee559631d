"""The learner's metrics for Prometheus, of a step's record as the catalogue describes it."""

from __future__ import annotations

from prometheus_client import generate_latest
from prometheus_client.openmetrics import exposition, parser

from rollmesh.learner.metrics.prometheus import LearnerMetrics

STALLS = {"stalled_seconds": 4.0, "stalled_seconds_total": 9.0, "stalls_total": 2.0}
STEP = {
    "critic/score/mean": 0.5,
    "rollout_corr/rollout_is_eff_sample_size": 0.9,
    "mismatch/log_prob_diff": 0.01,
    "timing_s/gen": 1.5,
    "timing_s/update_actor": 2.5,
    "samples": 30.0,
    "unscored_members": 10.0,
    "total/tokens": 1000.0,
    "time": 1_700_000_000.0,
}


def test_a_report_is_shown_until_the_next() -> None:
    metrics = LearnerMetrics()

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"rollmesh_learner_{name}", labels)

    metrics.update({}, steps=0, phase="starting", stalls=dict.fromkeys(STALLS, 0.0))
    assert (value("steps_total"), value("reward"), value("unscored_members_ratio")) == (0, None, None)
    metrics.update(STEP, steps=3, phase="training", stalls=STALLS)
    assert (value("steps_total"), value("reward"), value("trained_tokens_total")) == (3, 0.5, 1000)
    assert value("effective_sample_size_ratio") == 0.9
    assert value("unscored_members_ratio") == 0.25
    assert (value("step_seconds", phase="gen"), value("step_seconds", phase="update_actor")) == (1.5, 2.5)
    assert (value("phase", phase="training"), value("phase", phase="starting")) == (1, 0)
    assert (value("present_stall_seconds"), value("stalled_seconds_total"), value("stalls_total")) == (4, 9, 2)
    metrics.update({**STEP, "rollout_corr/ratio/ess": 0.4}, steps=4, phase="training", stalls=STALLS)
    assert value("effective_sample_size_ratio") == 0.4, "the ratio's own comes first"


def test_both_formats_can_be_read() -> None:
    metrics = LearnerMetrics()
    metrics.update(STEP, steps=3, phase="training", stalls=STALLS)
    text = exposition.generate_latest(metrics.registry).decode()
    names = [family.name for family in parser.text_string_to_metric_families(text)]
    assert len(names) == len(set(names))
    assert b"rollmesh_learner_steps_total 3.0" in generate_latest(metrics.registry)
