"""Where the time of a run went: shares of the learner's steps, of idle generators, of reward workers.

Steps that begin a learner are left out: they wait for programs that start. Nothing is estimated: a share that no
record tells is None.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollmesh.report.metrics import Record, metric_value

WAIT, CLAIM, PUBLISH, CHECKPOINT = "wait", "claim", "publish", "checkpoint"
_PHASES = {
    WAIT: "timing_s/gen",
    CLAIM: "timing_s/claim",
    PUBLISH: "timing_s/update_weights",
    CHECKPOINT: "timing_s/save_checkpoint",
    "train": "timing_s/update_actor",
    "prepare": "timing_s/prepare",
}


@dataclass(frozen=True, slots=True)
class TimeUse:
    """Shares of time.

    Attributes:
        steps: that were counted.
        seconds: of all of them, or of watching.
        learner: share of the learner's time by phase, 0 to 1.
        idle: share of the generators' time in which they decoded nothing, because nothing was granted.
        reward_busy: share of the reward workers' time with calls.
        reward_workers: of all services, at most at one time.
        unscored: finished responses that waited for their reward, mean.
        active: responses that were decoded, mean.
        generators: mean.
    """

    steps: int
    seconds: float
    learner: Mapping[str, float] = field(default_factory=dict)
    idle: float | None = None
    reward_busy: float | None = None
    reward_workers: int = 0
    unscored: float | None = None
    active: float | None = None
    generators: float = 0.0


def time_use(steps: Sequence[Record], snapshots: Sequence[Record]) -> TimeUse | None:
    """The time of a run; None before its second step.

    Args:
        steps: training records of the surviving lineage.
        snapshots: of `mesh.jsonl`, in the order of time.
    """
    pairs = list(itertools.pairwise(steps))
    counted = [new for old, new in pairs if new.get("incarnation") == old.get("incarnation")]
    seconds = sum(metric_value(step, "timing_s/step") or 0.0 for step in counted)
    if not counted or seconds <= 0:
        return None
    spent = {
        phase: sum(metric_value(step, metric) or 0.0 for step in counted) / seconds for phase, metric in _PHASES.items()
    }
    begin = float(counted[0].get("time", 0.0)) - (metric_value(counted[0], "timing_s/step") or 0.0)
    during = [record for record in snapshots if begin <= float(record["time"]) <= float(steps[-1]["time"])]
    return mesh_use(during, TimeUse(len(counted), seconds, spent))


def mesh_use(snapshots: Sequence[Record], learner: TimeUse) -> TimeUse:
    """Adds the shares of the generators and of the reward workers, from snapshots of the mesh.

    Args:
        snapshots: in the order of time.
        learner: the learner's shares.
    """
    pairs = [(old, new) for old, new in itertools.pairwise(snapshots) if new["time"] > old["time"]]
    present = sum(_amount(new, "generators") * _elapsed(old, new) for old, new in pairs)
    working = sum(_amount(new, "reward_workers") * _elapsed(old, new) for old, new in pairs)
    total = sum(_elapsed(old, new) for old, new in pairs)
    return TimeUse(
        learner.steps,
        learner.seconds,
        learner.learner,
        idle=min(1.0, _grown(pairs, "idle_s") / present) if present and "idle_s" in snapshots[-1] else None,
        reward_busy=min(1.0, _grown(pairs, "reward_busy_s") / working) if working else None,
        reward_workers=int(max((_amount(record, "reward_workers") for record in snapshots), default=0.0)),
        unscored=_mean(snapshots, "members_unscored"),
        active=_mean(snapshots, "active_sequences"),
        generators=present / total if total else 0.0,
    )


def _grown(pairs: Sequence[tuple[Record, Record]], name: str) -> float:
    """Growth of a total; one that begins at 0 again, with its process, does not count as less."""
    return sum(max(0.0, _amount(new, name) - _amount(old, name)) for old, new in pairs)


def _elapsed(old: Record, new: Record) -> float:
    return float(new["time"]) - float(old["time"])


def _amount(record: Record, name: str) -> float:
    return metric_value(record, name) or 0.0


def _mean(snapshots: Sequence[Record], name: str) -> float | None:
    found = [value for record in snapshots if (value := metric_value(record, name)) is not None]
    return sum(found) / len(found) if found else None
