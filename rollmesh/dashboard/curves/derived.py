"""Columns that follow from others: rates of totals, shares of time and of tokens."""

from __future__ import annotations

import numpy as np

from rollmesh.dashboard.curves.columns import Column, RecordColumns

GENERATED_PER_S, GATE_SHARE, LEARNER_SHARE = "generated_per_s", "gate_share", "learner_share"
AGE = "staleness/age/"
_HISTOGRAM = "staleness/histogram/"
# Seconds over which rates of totals are taken: generators report about every second.
_WINDOW_S = 5.0


def with_rates(snapshots: RecordColumns) -> RecordColumns:
    """Snapshots with rates over the last seconds.

    Returns:
        Also: tokens generated per second; the share of the time that generators stood at the gate, and that the learner
        waited for groups. NaN where a launch ended in between.
    """
    time = snapshots.column("time")
    gate = _growth_per_s(time, snapshots.column("gate_wait_s"))
    learner = _growth_per_s(time, snapshots.column("learner_wait_s"))
    return snapshots.extended(
        {
            GENERATED_PER_S: _growth_per_s(time, snapshots.column("generated_tokens")),
            GATE_SHARE: _share(gate, snapshots.column("generators")),
            LEARNER_SHARE: _share(learner, np.ones_like(time)),
        }
    )


def token_ages(steps: RecordColumns) -> dict[str, Column]:
    """The share of each step's trained tokens by age in versions, under `staleness/age/AGE`, youngest first."""
    names = [name for name in steps.names() if name.startswith(_HISTOGRAM)]
    ages = sorted(int(name.removeprefix(_HISTOGRAM)) for name in names)
    counts = {age: np.nan_to_num(steps.column(f"{_HISTOGRAM}{age}")) for age in ages}
    total = np.sum(list(counts.values()), axis=0) if counts else np.zeros(len(steps))
    with np.errstate(invalid="ignore", divide="ignore"):
        return {f"{AGE}{age}": np.where(total > 0, count / total, np.nan) for age, count in counts.items()}


def _growth_per_s(time: Column, total: Column) -> Column:
    """Growth per second over the last seconds of each row; NaN for the first row and across launches."""
    if len(time) == 0:
        return time
    before = np.minimum(np.searchsorted(time, time - _WINDOW_S), np.maximum(np.arange(len(time)) - 1, 0))
    elapsed = time - time[before]
    # The launcher takes a snapshot every second; without one for long there was no launcher.
    with np.errstate(invalid="ignore", divide="ignore"):
        growth = np.where((elapsed > 0) & (elapsed <= 2 * _WINDOW_S), (total - total[before]) / elapsed, np.nan)
    return np.where(growth >= 0, growth, np.nan)


def _share(waited_per_s: Column, waiters: Column) -> Column:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.clip(np.where(waiters > 0, waited_per_s / waiters, np.nan), 0.0, 1.0)
