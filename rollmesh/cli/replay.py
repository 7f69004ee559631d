"""`rollmesh replay`: a recorded stage, trained on again by a learner alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollmesh.cli.options import OVERRIDES, RunFolder
from rollmesh.mesh.config import load_config
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.runtime.ranks import become_ranks

if TYPE_CHECKING:
    from rollmesh.learner.recording.compare import ComparedStep

# Values shown per version where all are equal, and where they are not.
_SHOWN = ("critic/score/mean", "actor/loss", "actor/grad_norm")
_DIFFERENCES = 8


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("replay", context_settings=OVERRIDES)(_replay)


def _replay(
    context: typer.Context,
    run: RunFolder,
    from_checkpoint: Annotated[
        Path | None, typer.Option("--from-checkpoint", help="Checkpoint folder to start from.")
    ] = None,
    from_start: Annotated[
        bool, typer.Option("--from-start", help="Start from the initial model, as the run did.")
    ] = False,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Batches to train; all, if left out.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder to write to; RUN/replay, if left out.")] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Compare the metrics with the run's; exits with 1 if they differ.")
    ] = False,
    tolerance: Annotated[
        float, typer.Option("--tolerance", min=0, help="Relative difference that counts as equal.")
    ] = 1e-6,
) -> None:
    """Train on the recorded batches of a run, without a mesh; other settings: --algorithm.KEY=v, --learner.KEY=v."""
    if from_start and from_checkpoint is not None:
        raise ConfigError("--from-start and --from-checkpoint exclude each other")
    from rollmesh.run_files import read_config

    before = read_config(run)
    config = load_config(before.model_dump(mode="json"), context.args)
    become_ranks(config.learner.ranks, modules=("rollmesh.learner.coordinator.replay",))
    out = out or run / "replay"
    from rollmesh.learner.coordinator.replay import replay
    from rollmesh.mesh.runtime.log_format import LogSettings, setup_logging

    setup_logging("replay", LogSettings.of(config))
    done = replay(config, run, out, checkpoint=from_checkpoint, steps=steps)
    if done is None or int(os.environ.get("RANK", "0")) > 0:
        return
    typer.echo(f"trained versions {done.first} to {done.last} again ({done.reason}); metrics and checkpoint: {out}")
    if compare and not _compare(run, out, tolerance):
        raise typer.Exit(1)


def _compare(run: Path, out: Path, tolerance: float) -> bool:
    """Prints both runs step by step; whether they agree."""
    from rollmesh.learner.metrics.files import METRICS
    from rollmesh.learner.recording.compare import compare

    equal = True
    for step in compare(run / METRICS, out / METRICS, tolerance=tolerance):
        typer.echo(_line(step))
        for difference in step.differences[:_DIFFERENCES]:
            typer.echo(f"  {difference.name}: {_number(difference.recorded)} -> {_number(difference.replayed)}")
        if len(step.differences) > _DIFFERENCES:
            typer.echo(f"  and {len(step.differences) - _DIFFERENCES} more")
        equal = equal and not step.differences
    return equal


def _line(step: ComparedStep) -> str:
    shown = ", ".join(f"{name} {_number(step.replayed.get(name))}" for name in _SHOWN if name in step.replayed)
    agree = f"{len(step.differences)} of {step.metrics} metrics differ" if step.differences else "equal"
    return f"version {step.version}: {agree} ({shown})"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
