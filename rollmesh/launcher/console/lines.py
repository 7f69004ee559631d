"""Steps, evaluations and the ledger, each in one line."""

from __future__ import annotations

from rollmesh.launcher.console.learning_metrics import model_parts, response_parts
from rollmesh.launcher.console.progress import Progress
from rollmesh.launcher.console.text import duration
from rollmesh.launcher.mesh_client import Snapshot
from rollmesh.mesh.config.models import Config
from rollmesh.report.metrics import REWARD, Record, metric_value


def number(record: Record, name: str, form: str) -> str:
    """A metric in a form; a dash where it is missing."""
    value = metric_value(record, name)
    return "-" if value is None else format(value, form)


def run_line(config: Config, progress: Progress) -> str:
    """A run and how far it is, in one line."""
    left = f", {duration(progress.left_s)} left" if progress.left_s else ""
    where = f"run {config.run.name}: {config.algorithm.name} on {config.model.path}"
    return f"{where}, {progress.of_steps(progress.step)}{left}"


def training_line(record: Record, progress: Progress, generated_per_s: float | None) -> str:
    """A training step in one line.

    Args:
        record: of the step.
        progress: of the run, this step included.
        generated_per_s: tokens that generators sample; None: not known yet.
    """
    trained = number(record, "tokens_per_second", ".0f")
    parts = [
        f"reward {number(record, REWARD, '.3f')}",
        *response_parts(record),
        *model_parts(record),
        f"tokens/s {'-' if generated_per_s is None else f'{generated_per_s:.0f}'} generated {trained} trained",
    ]
    if progress.left_s:
        parts.append(f"{duration(progress.left_s)} left")
    return f"{progress.of_steps(int(record['step']))}: {', '.join(parts)}"


def evaluation_line(record: Record, progress: Progress) -> str:
    """An evaluation round in one line."""
    reward, failed = number(record, "eval/reward", ".3f"), int(metric_value(record, "eval/failed") or 0)
    asked = failed + int(metric_value(record, "eval/scored") or 0)
    left_out = f" ({failed} of {asked} responses have no reward and are left out)" if failed else ""
    return f"{progress.of_steps(int(record['step']))}: held-out reward {reward}{left_out}"


def ledger_line(snapshot: Snapshot) -> str:
    """Counts of the admitted groups by state."""
    if snapshot.table is None:
        return "-"
    counts = snapshot.table.counts
    return (
        f"admitted {counts.admitted} = generating {counts.generating} + ready {counts.ready} + "
        f"leased {counts.leased} + trained, not yet committed {counts.consumed} + "
        f"trained and committed {counts.trained} + "
        f"stale {counts.evicted_stale} + filtered {counts.filtered} + failed {counts.failed}"
    )
