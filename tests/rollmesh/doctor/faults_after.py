"""Faults of runs, as the services record them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollmesh.launcher.folder import write_mesh
from rollmesh.learner.liveness.stall_reporter import FILE as STALLS
from rollmesh.report.restarts import record_restart
from tests.rollmesh.doctor.recorded_run import STEPS, RecordedRun


@dataclass(frozen=True)
class Fault:
    """A run with one thing wrong.

    Attributes:
        run: its records.
        sections: of its configuration.
        more: writes further files into its folder.
    """

    run: RecordedRun = field(default_factory=RecordedRun)
    sections: Mapping[str, Any] = field(default_factory=dict)
    more: Callable[[Path], None] = lambda _folder: None


def _always(**metrics: Any) -> RecordedRun:
    """Metrics of all steps, with two underscores for each slash."""
    values = {name.replace("__", "/"): value for name, value in metrics.items()}
    return RecordedRun(metrics=lambda _step: values)


def _rising(metric: str, first: float, last: float) -> RecordedRun:
    return RecordedRun(metrics=lambda step: {metric: first + (last - first) * step / STEPS})


def _stalled(folder: Path) -> None:
    events = ((100.0, "begins", 60.0, "generator-1 holds 3"), (160.0, "over", 120.0, "generator-1 left"))
    lines = [{"time": time, "event": kind, "seconds": seconds, "text": text} for time, kind, seconds, text in events]
    (folder / STALLS).write_text("".join(json.dumps(line) + "\n" for line in lines))


def _restarted(folder: Path) -> None:
    for second in range(3):
        record_restart(folder, "generator-0", "exit", 1000.0 + second)


FAULTS: dict[str, Fault] = {
    "generation-too-slow": Fault(RecordedRun(waits=0.6)),
    "training-too-slow": Fault(RecordedRun(idle=0.6)),
    "rewards-too-slow": Fault(RecordedRun(waits=0.6, reward_busy=0.97)),
    "rewards-far-away": Fault(RecordedRun(waits=0.6, gauges={"members_unscored": 100.0})),
    "both-sides-wait": Fault(RecordedRun(waits=0.4, idle=0.4)),
    "checkpoints-too-often": Fault(
        _always(timing_s__save_checkpoint=3.0), {"checkpoint": {"every_steps": 1, "every_s": None}}
    ),
    "weights-too-slow": Fault(_always(timing_s__update_weights=3.0)),
    "no-variance": Fault(_always(frac_reward_zero_std=0.8)),
    "cut-off-responses": Fault(_always(response_length__clip_ratio=0.6)),
    "branches": Fault(
        _always(agent__turns__mean=3, agent__turns_dropped__mean=2, agent__turns_dropped_rewritten__mean=2)
    ),
    "evicted-groups": Fault(RecordedRun(counters={"admitted": 150, "evicted_stale": 50})),
    "failed-groups": Fault(
        RecordedRun(
            counters={"admitted": 150, "failed": 50},
            reasons={"failed/min_members": 50},
            causes=("reward exception: no",),
        )
    ),
    "rewards-time-out": Fault(
        _always(unscored_members=16, unscored__reward_timeout=16, unscored_cause="reward_timeout: no free worker")
    ),
    "rewards-fail": Fault(
        _always(unscored_members=16, unscored__reward_exception=16, unscored_cause="reward_exception: KeyError")
    ),
    "log-probs-differ": Fault(_always(mismatch__log_prob_diff=0.4)),
    "low-sample-size": Fault(_always(rollout_corr__ratio__ess=0.2)),
    "policy-runs-away": Fault(_rising("actor/reference_kl", 0.01, 3.0)),
    "entropy-collapse": Fault(_rising("actor/entropy", 1.0, 0.0)),
    "no-reward-at-all": Fault(_always(critic__score__mean=0.0, critic__score__max=0.0)),
    "reward-saturated": Fault(_rising("critic/score/mean", 0.99, 1.0)),
    "gradient-spikes": Fault(RecordedRun(metrics=lambda step: {"actor/grad_norm": 50.0 if step % 10 == 0 else 0.5})),
    "gradients-not-finite": Fault(_always(skipped_updates=1)),
    "transfers-fail": Fault(_always(push__errors=7)),
    "checkpoints-fail": Fault(_always(checkpoint__failed=2)),
    "services-restart": Fault(more=_restarted),
    "run-stalls": Fault(more=_stalled),
    "ledger-differs": Fault(RecordedRun(discrepancies=("trained: counted 100, found 99",))),
    "memory-full": Fault(RecordedRun(peak_memory_bytes={"learner": 1 << 50})),
    "ended-by-an-error": Fault(RecordedRun(ended="learner: exited with status 9")),
    "launcher-killed": Fault(more=lambda folder: write_mesh(folder, "127.0.0.1:9")),
    "swaps-too-often": Fault(
        _always(placement__swap_share=0.5, placement__turns=20), {"placement": "collocated", "rollout": {"replicas": 1}}
    ),
}
"""By the id that the documentation's table gives each."""
