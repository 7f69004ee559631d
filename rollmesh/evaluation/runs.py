"""Runs side by side: their settings where these differ, and their outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rollmesh.report.changes import describe_changes
from rollmesh.report.metrics import REWARD, is_training, run_records
from rollmesh.report.summary import read_summary
from rollmesh.run_files import read_any_config
from rollmesh.training.state import training_state

# Share of the steps whose rewards count as the last ones.
_LAST = 10


def run_outcome(run: Path) -> dict[str, Any]:
    """The outcome of a run by name; None where it is not known.

    Raises:
        DataError: it has no summary yet.
    """
    if (training := training_state(run)) is not None:
        held_out = [found.get("loss") for found in training.held_out]
        return {
            "ended": training.ended or None,
            "steps": training.steps,
            "training_s": training.training_s,
            "loss, last": training.loss_last,
            "held-out loss, first": held_out[0] if held_out else None,
            "held-out loss, last": held_out[-1] if held_out else None,
            "best held-out value": None if training.best is None else training.best["value"],
            "tokens/s trained": training.tokens_per_s,
        }
    summary = read_summary(run)
    rewards = [float(record[REWARD]) for record in run_records(run) if is_training(record)]
    tokens = sum(summary.staleness.values())
    staleness = sum(int(age) * count for age, count in summary.staleness.items()) / tokens if tokens else None
    return {
        "ended": summary.ended or None,
        "steps": summary.steps,
        "training_s": summary.training_s,
        "held-out reward, first": summary.held_out_first,
        "held-out reward, last": summary.held_out_last,
        "training reward, last tenth": fmean(rewards[-max(1, len(rewards) // _LAST) :]) if rewards else None,
        "tokens/s generated": summary.tokens_per_s_generated,
        "tokens/s trained": summary.tokens_per_s_trained,
        "staleness": staleness,
        "peak memory, MiB": sum(summary.peak_memory_mb.values()) or None,
        "restarts": sum(sum(reasons.values()) for reasons in summary.restarts.values()),
    }


def changed_settings(runs: Sequence[Path]) -> dict[str, list[str]]:
    """The settings of each further run that differ from those of the first, `KEY OLD -> NEW`.

    Raises:
        DataError: a folder is not that of a run.
    """
    first, *others = ((run, read_any_config(run).model_dump(mode="json")) for run in runs)
    return {str(run): describe_changes(first[1], values) for run, values in others}
