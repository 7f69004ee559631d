"""`rollmesh doctor`: what is wrong before, during and after a run, and what to do about it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollmesh.cli.joining import Join, by_variables_alone
from rollmesh.cli.options import OVERRIDES, Mesh, TlsCa, TlsCert, TlsKey, TokenFile, ended_run, read_config, target
from rollmesh.mesh.config.variables import overrides_from
from rollmesh.mesh.errors import ConfigError

if TYPE_CHECKING:
    from rollmesh.doctor.findings import Diagnosis


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("doctor", context_settings=OVERRIDES)(_doctor)


def _doctor(
    context: typer.Context,
    subject: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CFG.YAML|RUN]",
            help="A configuration, with --section.key=value, is examined before its run; a run folder during or after "
            "it. If left out: the latest run below runs/, preferably one in progress.",
        ),
    ] = None,
    mesh: Mesh = None,
    join: Join = None,
    command: Annotated[
        str, typer.Option("--for", metavar="COMMAND", help="Whose configuration it is: run, sft, rm or dpo.")
    ] = "run",
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="CHECK", help="Make this check of a configuration alone. May be repeated."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also show what is as it should be.")] = False,
    watch_s: Annotated[
        float, typer.Option("--watch", min=5.0, max=600.0, help="Seconds for which a mesh in progress is watched.")
    ] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Find what is wrong, and say what to do: before a run, in a mesh that works, and in the records of a run.

    Before a run: versions, devices, ports, disk, memory, limits, clocks, Redis, addresses, certificates, inputs,
    rewards. During and after it: where time went and which key to change, losses, signs of bad learning, restarts.
    Exits with 1 where there is a problem; warnings are none.
    """
    if subject is not None and by_variables_alone(mesh, join):
        mesh = join = None
    is_named = mesh is not None or join is not None
    if not is_named and subject is not None and not subject.is_dir():
        show(_before(subject, command, context, only or []), everything=everything, as_json=as_json)
        return
    if context.args:
        raise ConfigError(f"{context.args[0]} changes a configuration, and none is given", hint="give its file first")
    if not is_named and (ended := _ended(subject)) is not None:
        from rollmesh.doctor.after.diagnosis import diagnose_run

        show(diagnose_run(ended), everything=everything, as_json=as_json)
        return
    where = target(subject, mesh, join=join, token_file=token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key)
    from rollmesh.doctor.live.diagnosis import diagnose_mesh

    show(
        diagnose_mesh(where.address, where.security, where.folder, watch_s=watch_s),
        everything=everything,
        as_json=as_json,
    )


def _ended(run: Path | None) -> Path | None:
    """The folder of a run in which no launcher works, for whatever reason; None where one does, or might."""
    from rollmesh.run_files import is_in_use

    if run is None:
        return ended_run(None, None)
    return None if is_in_use(run) else run


def _before(path: Path, command: str, context: typer.Context, only: list[str]) -> Diagnosis:
    if command != "run":
        return _before_training(path, command, context, only)
    from rollmesh.doctor.before.checks import NAMES, diagnose_configuration

    if unknown := [name for name in only if name not in NAMES]:
        raise ConfigError(f"there is no check {unknown[0]!r}", hint=f"checks: {', '.join(NAMES)}")
    return diagnose_configuration(read_config(path, context), str(path), only)


def _before_training(path: Path, command: str, context: typer.Context, only: list[str]) -> Diagnosis:
    from rollmesh.mesh.config.trainers.configs import CONFIGS
    from rollmesh.trainers import read_trainer_config

    if command not in CONFIGS:
        raise ConfigError(f"--for {command}: no such command", hint=f"known: run, {', '.join(CONFIGS)}")
    config = read_trainer_config(command, path, [*overrides_from(os.environ), *context.args])
    from rollmesh.doctor.before.trainings import diagnose_training

    return diagnose_training(config, command, str(path), only)


def show(diagnosis: Diagnosis, *, everything: bool, as_json: bool) -> None:
    """Prints a diagnosis, and ends the command with 1 where there is a problem."""
    if as_json:
        typer.echo(json.dumps(diagnosis.to_json(), indent=1))
    else:
        for line in diagnosis.lines(everything=everything):
            typer.echo(line)
    if not diagnosis.healthy:
        raise typer.Exit(1)
