"""The learner's metrics for Prometheus: the last step, what it waits for, and its stalls.

`metrics.jsonl` and trackers have all metrics of each step; these are the few that alerts and dashboards need.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from prometheus_client import CollectorRegistry

from rollmesh.learner.status import Phase
from rollmesh.learner.weights.push_metrics import METRICS as PUSH_METRICS
from rollmesh.mesh.telemetry.metric_spec import MetricSpec, SpecCollector, SpecFactory

_LEARNER = SpecFactory("learner")
_counter, _gauge = _LEARNER.counter, _LEARNER.gauge
# Metric of a step's record (`learner.metrics.catalogue`) -> metric here; the first of several names that is there.
_OF_STEP: Mapping[MetricSpec, tuple[str, ...]] = {
    _gauge("reward", "Mean reward of the last batch"): ("critic/score/mean",),
    _gauge("held_out_reward", "Held-out reward of the last evaluation"): ("eval/reward",),
    _gauge("loss", "Loss of the last batch"): ("actor/loss",),
    _gauge("entropy_nats", "Entropy of the policy at the trained tokens"): ("actor/entropy",),
    _gauge("kl_nats", "KL(anchor || current) of the last batch, k1"): ("actor/ppo_kl",),
    _gauge("gradient_norm", "Norm of the gradient before clipping"): ("actor/grad_norm",),
    _gauge("clipped_tokens_ratio", "Tokens without gradient because of the clip"): ("actor/pg_clipfrac",),
    _gauge("effective_sample_size_ratio", "Effective sample size of the ratios current / behaviour"): (
        "rollout_corr/ratio/ess",
        "rollout_corr/rollout_is_eff_sample_size",
    ),
    _gauge("log_prob_gap_nats", "Mean absolute difference of the learner's and the generator's log-probs"): (
        "mismatch/log_prob_diff",
    ),
    _gauge("staleness_versions", "Mean age of the trained tokens, in versions"): ("staleness/mean",),
    _gauge("staleness_max_versions", "Age of the oldest of them, in versions"): ("staleness/max",),
    _gauge("response_tokens", "Mean length of the responses, in tokens"): ("response_length/mean",),
    _gauge("zero_variance_groups_ratio", "Groups in which all rewards are equal"): ("frac_reward_zero_std",),
    _gauge("trained_tokens_per_second", "Trained tokens per second of the last step"): ("tokens_per_second",),
    _gauge("last_step_timestamp_seconds", "Unix time of the last step's record"): ("time",),
    _counter("trained_tokens", "Response tokens trained by the run"): ("total/tokens",),
    _counter("trained_members", "Responses trained by the run"): ("total/samples",),
    _counter("checkpoints_failed", "Checkpoints that a disk has refused"): ("checkpoint/failed",),
}
_STEP_SECONDS = _gauge(
    "step_seconds", "Time of the last step by phase: gen (waiting for groups), prepare, update_actor and so on", "phase"
)
_STEPS = _counter("steps", "Steps trained by the run")
_PHASE = _gauge("phase", "1 for the present phase, 0 for the others", "phase")
_UNSCORED = _gauge("unscored_members_ratio", "Members of the last batch's groups without a reward")
_STALL = _gauge("present_stall_seconds", "For how long nothing has moved in the mesh; 0 while it does")
_STALLED = _counter("stalled_seconds", "Time of all stalls")
_STALLS = _counter("stalls", "Stalls of the mesh")
_OWN = (_STEP_SECONDS, _STEPS, _PHASE, _UNSCORED, _STALL, _STALLED, _STALLS)
METRICS = (*_OF_STEP, *_OWN, *PUSH_METRICS)
_PHASES = get_args(Phase)
_TIMING = "timing_s/"


class LearnerMetrics:
    """Shows what was reported last, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._values: dict[str, dict[tuple[str, ...], float]] = {}
        self.registry.register(SpecCollector((*_OF_STEP, *_OWN), lambda: self._values))

    def update(self, step: Mapping[str, float], *, steps: int, phase: Phase, stalls: Mapping[str, float]) -> None:
        """Takes a report.

        Args:
            step: the last step's record; empty before the first.
            steps: of the run.
            phase: the present one.
            stalls: of `StallReporter.gauges`.
        """
        values: dict[str, dict[tuple[str, ...], float]] = {
            _STEPS.name: {(): steps},
            _PHASE.name: {(name,): float(name == phase) for name in _PHASES},
            _STALLED.name: {(): stalls["stalled_seconds_total"]},
            _STALLS.name: {(): stalls["stalls_total"]},
            _STALL.name: {(): stalls["stalled_seconds"]},
            _STEP_SECONDS.name: {
                (name.removeprefix(_TIMING),): value for name, value in step.items() if name.startswith(_TIMING)
            },
        }
        for spec, names in _OF_STEP.items():
            if (name := next((name for name in names if name in step), None)) is not None:
                values[spec.name] = {(): step[name]}
        if "samples" in step:
            unscored = step.get("unscored_members", 0.0)
            values[_UNSCORED.name] = {(): unscored / max(1.0, unscored + step["samples"])}
        self._values = values
