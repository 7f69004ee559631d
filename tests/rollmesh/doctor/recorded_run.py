"""A run folder as the product writes it: metrics, snapshots of its mesh, its end. Healthy, unless a test says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollmesh.launcher.mesh_client import Snapshot
from rollmesh.launcher.mesh_log import MeshLog
from rollmesh.learner.metrics.trackers.local import JsonlTracker
from rollmesh.learner.recovery.run_identity import CONFIG
from rollmesh.mesh.config import load_config, save_config
from rollmesh.mesh.config.models import Config
from rollmesh.protos import buffer_pb2, membership_pb2
from rollmesh.report.summary import FinalState, write_summary

STEPS, STEP_S = 40, 10.0
_BEGAN = 1_700_000_000.0
Values = Mapping[str, Any]
ByStep = Callable[[int], Values]


def config_in(folder: Path, **sections: Any) -> Config:
    """The configuration of a run in this folder."""
    return load_config(
        {
            "run": {"name": folder.name, "dir": str(folder.parent)},
            "model": {"path": "a/model"},
            "data": {"train": "no.jsonl"},
            "algorithm": "grpo",
            "rollout": {"replicas": 2},
            **sections,
        }
    )


@dataclass
class RecordedRun:
    """The events of a run.

    Attributes:
        metrics: of a step, in addition to healthy ones.
        waits: share of the learner's time; the rest of a step is training.
        idle: share of the generators' time.
        reward_busy: share of the time of one reward worker.
        gauges: of each generator, in addition.
        counters: of the train table at the end.
        reasons: of its ends of groups.
        causes: of failed groups.
        discrepancies: of the recount.
        ended: see `Summary`.
        peak_memory_bytes: by service.
    """

    metrics: ByStep = lambda _step: {}
    waits: float = 0.05
    idle: float = 0.05
    reward_busy: float = 0.1
    gauges: Mapping[str, float] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    reasons: Mapping[str, int] = field(default_factory=dict)
    causes: tuple[str, ...] = ()
    discrepancies: tuple[str, ...] = ()
    ended: str = "finished"
    peak_memory_bytes: Mapping[str, int] = field(default_factory=lambda: {"learner": 1 << 20})

    def write(self, folder: Path, config: Config) -> None:
        """Writes the folder with the writers of learner and launcher."""
        folder.mkdir(exist_ok=True)
        save_config(config, folder / CONFIG)
        tracker = JsonlTracker(folder / "metrics.jsonl")
        for step in range(1, STEPS + 1):
            tracker.log(step, {**self._healthy(step), **self.metrics(step)})
        tracker.close()
        log = MeshLog(folder, lambda _text: None)
        for second in range(0, int(STEPS * STEP_S), 5):
            log.add(self._snapshot(float(second)), _BEGAN + second)
        write_summary(folder, config, self._final())

    def _healthy(self, step: int) -> dict[str, Any]:
        return {
            "time": _BEGAN + step * STEP_S,
            "wall_s": step * STEP_S,
            "incarnation": 1,
            "samples": 64,
            "critic/score/mean": 0.3 + 0.2 * step / STEPS,
            "critic/score/min": 0.0,
            "critic/score/max": 1.0,
            "frac_reward_zero_std": 0.2,
            "response_length/clip_ratio": 0.01,
            "unscored_members": 0,
            "rollout_corr/ratio/ess": 0.95,
            "staleness/mean": 1.0,
            "mismatch/log_prob_diff": 0.01,
            "mismatch/k3_kl": 0.001,
            "actor/entropy": 1.0 - 0.3 * step / STEPS,
            "actor/grad_norm": 0.5 + 0.1 * (step % 3),
            "actor/reference_kl": 0.01,
            "skipped_updates": 0,
            "timing_s/step": STEP_S,
            "timing_s/gen": self.waits * STEP_S,
            "timing_s/update_actor": (1 - self.waits) * STEP_S,
            "push/count": step,
            "push/errors": 0,
        }

    def _snapshot(self, second: float) -> Snapshot:
        table = buffer_pb2.DescribeResponse(
            waiting_for_inserts_ms=int(1000 * self.waits * second),
            waiting_for_samples_ms=int(2000 * self.idle * second),
        )
        gauges = {"gate_wait_seconds": self.idle * second, "active_sequences": 32.0, **self.gauges}
        members = [
            membership_pb2.Member(member_id=f"generator-{number}", role=membership_pb2.ROLE_GENERATOR, gauges=gauges)
            for number in range(2)
        ]
        busy = {"reward_workers": 1.0, "reward_busy_seconds": self.reward_busy * second}
        members.append(membership_pb2.Member(member_id="reward-0", role=membership_pb2.ROLE_REWARD, gauges=busy))
        return Snapshot(table=table, members=members)

    def _final(self) -> FinalState:
        counters = {"admitted": 100, "trained": 100, **self.counters}
        ledger = buffer_pb2.LedgerResponse(
            counters=buffer_pb2.LedgerCounts(**counters, reasons=self.reasons),
            discrepancies=self.discrepancies,
            failed=[buffer_pb2.FailedGroup(group_id=str(index), causes=[c]) for index, c in enumerate(self.causes)],
        )
        return FinalState(
            tables={"train": buffer_pb2.DescribeResponse()},
            ledgers={"train": ledger},
            peak_memory_bytes=dict(self.peak_memory_bytes),
            wall_s=STEPS * STEP_S,
            ended=self.ended,
        )
