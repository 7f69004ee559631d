"""Curves for the report, computed from records, without drawing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from rollmesh.report.metrics import REWARD, Record, is_evaluation, is_training

# Phases of the learner's time, in the order in which the shares are stacked: name in the report -> metric.
_PHASES = {
    "wait": "timing_s/gen",
    "prepare": "timing_s/prepare",
    "claim": "timing_s/claim",
    "train": "timing_s/update_actor",
    "publish": "timing_s/update_weights",
    "checkpoint": "timing_s/save_checkpoint",
}


@dataclass(frozen=True)
class Curves:
    """The data of the plots. Seconds count from the run's first version; None where a record lacks a metric.

    Attributes:
        seconds, steps, reward, staleness_mean, staleness_max, trained_per_s: one entry per training step.
        phases: name -> seconds per training step.
        eval_seconds, eval_steps, held_out: one entry per evaluation, in the order of the versions evaluated.
        snapshot_seconds, generated_per_s, gate_share: one entry per pair of neighbouring snapshots. Tokens generated
            per second, and the share of the time that generators stood at the gate.
    """

    seconds: list[float]
    steps: list[int]
    reward: list[float | None]
    staleness_mean: list[float | None]
    staleness_max: list[float | None]
    trained_per_s: list[float | None]
    phases: dict[str, list[float]]
    eval_seconds: list[float]
    eval_steps: list[int]
    held_out: list[float | None]
    snapshot_seconds: list[float]
    generated_per_s: list[float | None]
    gate_share: list[float | None]


def build_curves(records: Sequence[Record], snapshots: Sequence[Record] = ()) -> Curves:
    """The curves of a run.

    Args:
        records: of `metrics.jsonl`.
        snapshots: of `mesh.jsonl`.
    """
    start = first_version_time(records) or (float(snapshots[0]["time"]) if snapshots else 0.0)
    training = [record for record in records if is_training(record)]
    evaluations = sorted((record for record in records if is_evaluation(record)), key=lambda item: int(item["step"]))
    pairs = [(old, new) for old, new in itertools.pairwise(snapshots) if new["time"] > old["time"]]
    phases = {
        phase: [metric_value(record, metric) or 0.0 for record in training]
        for phase, metric in _PHASES.items()
        if any(metric in record for record in training)
    }
    return Curves(
        seconds=[_seconds(record, start) for record in training],
        steps=[int(record["step"]) for record in training],
        reward=[metric_value(record, REWARD) for record in training],
        staleness_mean=[metric_value(record, "staleness/mean") for record in training],
        staleness_max=[metric_value(record, "staleness/max") for record in training],
        trained_per_s=[metric_value(record, "tokens_per_second") for record in training],
        phases=phases,
        eval_seconds=[_seconds(record, start) for record in evaluations],
        eval_steps=[int(record["step"]) for record in evaluations],
        held_out=[metric_value(record, "eval/reward") for record in evaluations],
        snapshot_seconds=[_seconds(new, start) for _, new in pairs],
        generated_per_s=[growth_per_s(old, new, "generated_tokens") for old, new in pairs],
        gate_share=[_gate_share(old, new) for old, new in pairs],
    )


def first_version_time(records: Sequence[Record]) -> float:
    """Unix time of the run's first version; 0 where there is no record."""
    for record in records:
        if "time" in record:
            return float(record["time"]) - (metric_value(record, "wall_s") or 0.0)
    return 0.0


def metric_value(record: Record, name: str) -> float | None:
    """A metric of a record; None where it is missing or null."""
    value = record.get(name)
    return float(value) if isinstance(value, int | float) else None


def growth_per_s(old: Record, new: Record, name: str) -> float | None:
    """Growth of a total per second between two snapshots."""
    before, after = metric_value(old, name), metric_value(new, name)
    elapsed = float(new["time"]) - float(old["time"])
    return None if before is None or after is None or elapsed <= 0 else (after - before) / elapsed


def smoothed(values: Sequence[float | None], window: int = 9) -> list[float]:
    """Centred moving average over the known values, shorter at the ends; the same length, NaN for unknown stretches."""
    half = window // 2
    result = []
    for index in range(len(values)):
        near = [value for value in values[max(0, index - half) : index + half + 1] if value is not None]
        result.append(sum(near) / len(near) if near else float("nan"))
    return result


def _seconds(record: Record, start: float) -> float:
    return float(record.get("time", start)) - start


def _gate_share(old: Record, new: Record) -> float | None:
    waited = growth_per_s(old, new, "gate_wait_s")
    generators = metric_value(new, "generators")
    return None if waited is None or not generators else min(1.0, max(0.0, waited / generators))
