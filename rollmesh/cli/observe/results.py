"""`rollmesh samples|report|evals|export|fetch`: the results of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollmesh.cli.options import RunFolder
from rollmesh.mesh.errors import DataError


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command("samples")(_samples)
    app.command("report")(_report)
    app.command("evals")(_evals)
    app.command("export")(_export)
    app.command("fetch")(_fetch)


def _samples(
    run: RunFolder,
    worst: Annotated[bool, typer.Option("--worst", help="Lowest rewards first, instead of latest first.")] = False,
    number: Annotated[int, typer.Option("-n", min=1, help="Samples to show.")] = 10,
) -> None:
    """Show kept samples with their rewards."""
    from rollmesh.report.samples import read_samples, sample_lines
    from rollmesh.run_files import trained_by

    if (command := trained_by(run)) is not None:
        raise DataError(
            f"{run} is of `rollmesh {command}`, which trains on data and samples nothing",
            hint=f"score with `model:{run}/hf/last`"
            if command == "rm"
            else f"`rollmesh generate --model {run}` shows what the model says",
        )
    for sample in read_samples(run, worst=worst, number=number):
        for line in sample_lines(sample):
            typer.echo(line)


def _report(run: RunFolder) -> None:
    """Write the run's report, the page of `rollmesh dashboard` as one HTML file, and say where it is."""
    from rollmesh.dashboard.report import write_report

    typer.echo(write_report(run))


def _evals(
    run: RunFolder,
    version: Annotated[
        str | None, typer.Option("--version", metavar="[I:]V", help="Show the prompts of this version's round.")
    ] = None,
    number: Annotated[int, typer.Option("-n", min=1, help="Prompts to show, lowest rewards first.")] = 10,
) -> None:
    """List the evaluations by version, the best one marked; or show prompts, responses and rewards of one."""
    from rollmesh.report.evals import aligned, result_lines, row_lines
    from rollmesh.run_files import trained_by
    from rollmesh.training.results import training_result_grid

    if (command := trained_by(run)) is not None:
        if version is not None:
            raise DataError(f"{run} is of `rollmesh {command}`, which keeps no prompts", hint="leave --version out")
        if not (rows := training_result_grid(run)):
            raise DataError(f"{run} has no evaluation yet", hint="see data.eval and eval.every_steps")
        for line in aligned(rows):
            typer.echo(line)
        return
    for line in result_lines(run) if version is None else row_lines(run, version, number):
        typer.echo(line)


def _export(
    run: RunFolder,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Hugging Face folder to write.")],
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint",
            metavar="NAME",
            help="Checkpoint: a name in RUN/checkpoints, or `best`; the latest, if left out.",
        ),
    ] = None,
    push_to: Annotated[
        str | None,
        typer.Option("--push-to", metavar="NAMESPACE/NAME", help="Also upload OUT to this repository of the HF Hub."),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="The repository is public, if --push-to has to make it.")
    ] = False,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write the adapter of learner.lora alone, as peft does.")
    ] = False,
) -> None:
    """Turn a checkpoint into a Hugging Face model folder."""
    from rollmesh.run_files import read_any_config

    config = read_any_config(run)
    from rollmesh.checkpoint_choice import checkpoint_path
    from rollmesh.export import export_adapter, export_checkpoint, latest_checkpoint

    chosen = checkpoint_path(run, checkpoint) if checkpoint is not None else latest_checkpoint(run)
    (export_adapter if adapter else export_checkpoint)(config, chosen, out)
    what = f"the adapter of {chosen}, for {config.model.path}" if adapter else f"{config.model.path} with {chosen}"
    typer.echo(f"{out}: {what}")
    if push_to is not None:
        from rollmesh.push import push_folder

        url = push_folder(out, push_to, private=not public, message=f"{config.run.name}: {chosen.name}")
        typer.echo(f"{push_to}: {url}")


def _fetch(
    url: Annotated[str, typer.Argument(metavar="URL/NAME", help="`checkpoint.copy_to` of the run, and its name.")],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder for the run, for example runs/NAME.")],
) -> None:
    """Bring a run back from its copies: the newest checkpoint, and what its learners have used."""
    from rollmesh.learner.checkpoint.names import CHECKPOINTS_NAME
    from rollmesh.learner.checkpoint.remote_copies import RemoteCopies
    from rollmesh.learner.recovery.consumption_log import LOG_NAME

    typer.echo(RemoteCopies(url).fetch(run / CHECKPOINTS_NAME, run / LOG_NAME))
