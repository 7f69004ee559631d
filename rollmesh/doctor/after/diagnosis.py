"""The diagnosis of a run folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rollmesh.doctor.after.bottleneck import judge_time
from rollmesh.doctor.after.incidents import judge_incidents
from rollmesh.doctor.after.learning import judge_learning
from rollmesh.doctor.after.losses import judge_losses
from rollmesh.doctor.after.run_records import RunRecords
from rollmesh.doctor.after.time_use import time_use
from rollmesh.doctor.findings import Diagnosis, Finding


def diagnose_run(folder: Path) -> Diagnosis:
    """Examines a run that has ended.

    Args:
        folder: of the run.

    Raises:
        DataError: it is not the folder of `rollmesh run`, or its files are damaged.
    """
    return Diagnosis(str(folder), list(examine(RunRecords.read(folder))))


def examine(run: RunRecords) -> Iterator[Finding]:
    """All rules over a run's records."""
    yield from judge_incidents(run)
    yield from judge_time(time_use(run.steps, run.snapshots), run.config, run.swaps.get("swap_share"))
    yield from judge_losses(run)
    yield from judge_learning(run)
