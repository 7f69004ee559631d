"""`rollmesh status`: the state of a mesh."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollmesh.cli.joining import Join
from rollmesh.cli.observe.table_console import table_console
from rollmesh.cli.options import Mesh, OptionalRunFolder, Target, TlsCa, TlsCert, TlsKey, TokenFile, ended_run, target
from rollmesh.mesh.errors import RollmeshError
from rollmesh.mesh.tables import TABLES

if TYPE_CHECKING:
    from rollmesh.training.summary import TrainingSummary


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("status")(_status)


def _status(
    run: OptionalRunFolder = None,
    mesh: Mesh = None,
    join: Join = None,
    every: Annotated[
        bool, typer.Option("--all", help="A row for each member, also where many in one state would be summed up.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as one JSON object.")] = False,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Show the mesh: version, ledger, ages, waits, stalls, turns, members, weights; of an ended run its summary.

    A training on data (`rollmesh sft`, `rm`, `dpo`) has no mesh: its summary is shown, in progress or ended.
    """
    if mesh is None and join is None and (training := _training(run)) is not None:
        _show_training(training, as_json=as_json)
        return
    if (ended := ended_run(run, mesh, join)) is not None:
        _show_ended(ended, as_json=as_json)
        return
    where = target(run, mesh, join=join, token_file=token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key)
    if as_json:
        typer.echo(json.dumps(asyncio.run(_read_all(where)), indent=2))
        return
    from rollmesh.launcher.console.lines import run_line
    from rollmesh.launcher.console.members_table import MOST, members_table
    from rollmesh.launcher.console.progress import Progress
    from rollmesh.launcher.console.tables import pushes_table, status_table
    from rollmesh.launcher.folder import learner_starts
    from rollmesh.launcher.mesh_client import MeshClient, Snapshot
    from rollmesh.launcher.trials.record import read_record
    from rollmesh.report.metrics import run_records
    from rollmesh.report.pushes import live_rows, transport_choices
    from rollmesh.report.turns import read_phases, shares_text, time_shares, turns_ended
    from rollmesh.run_files import read_launch

    async def read() -> tuple[Snapshot, list[list[str]], list[str]]:
        async with MeshClient(where.address, where.security) as mesh:
            snapshot = await mesh.read_snapshot()
            await mesh.read_sleep(snapshot)
            snapshot.learner_starts = where.folder is not None and learner_starts(where.folder)
            record = read_record(where.folder) if where.folder is not None else None
            snapshot.placement = record.text if record is not None else ""
            try:
                reported = await mesh.pushes(snapshot.members)
                return snapshot, live_rows(reported, None if every else MOST), transport_choices(reported)
            except RollmeshError as error:
                why = error.message if snapshot.learners() else snapshot.absent_learner()
                return snapshot, [], [f"the state of weights is not known: {why}"]

    snapshot, rows, notes = asyncio.run(read())
    if where.folder is not None:
        config = read_launch(where.folder)
        progress = Progress.of_run(config)
        records = run_records(where.folder)
        snapshot.unscored.add(records)
        progress.add(records)
        typer.echo(run_line(config, progress))
        # A learner that was replaced, or has left turns, leaves its last phase open.
        end = time.time() if snapshot.turns is not None else turns_ended(records)
        snapshot.turn_time = shares_text(time_shares(read_phases(where.folder), end))
    console = table_console()
    shown = [status_table(snapshot), members_table(snapshot.members, console.width, every=every)]
    if rows:
        shown.append(pushes_table(rows, console.width))
    with console.capture() as capture:
        console.print(*shown)
    for line in capture.get().splitlines():
        typer.echo(line.rstrip())  # cells are padded to their columns
    for line in notes:
        console.print(line, soft_wrap=True)
    if snapshot.run_finished:
        console.print("the run has finished")


def _training(run: Path | None) -> TrainingSummary | None:
    """The training on data in a folder; without one that is named, the one in progress, where no mesh is."""
    from rollmesh.launcher.folder import MESH
    from rollmesh.training.state import newest_in_progress, training_state

    if run is None and not any(Path("runs").glob(f"*/{MESH}")):
        run = newest_in_progress(Path("runs")) or ended_run(None, None)
    return training_state(run) if run is not None else None


def _show_training(summary: TrainingSummary, *, as_json: bool) -> None:
    from rollmesh.training.summary import IN_PROGRESS

    if as_json:
        typer.echo(json.dumps({"ended": summary.ended != IN_PROGRESS, "summary": summary.to_dict()}, indent=2))
        return
    typer.echo(f"run {summary.folder}")
    for line in summary.lines():
        typer.echo(line)


def _show_ended(run: Path, *, as_json: bool) -> None:
    """The summary of a run that has ended."""
    from rollmesh.report.summary import read_summary

    summary = read_summary(run)
    if as_json:
        typer.echo(json.dumps({"ended": True, "summary": summary.to_dict()}, indent=2))
        return
    typer.echo(f"run {run} has ended")
    for line in summary.lines():
        typer.echo(line)


async def _read_all(where: Target) -> dict[str, Any]:
    from rollmesh.launcher.mesh_client import MeshClient
    from rollmesh.launcher.trials.record import read_record
    from rollmesh.report.table_lines import message_to_dict

    async with MeshClient(where.address, where.security) as mesh:
        tables = {table: message_to_dict(await mesh.describe(table)) for table in TABLES}
        holders = {table: message_to_dict(await mesh.holders(table, 0)) for table in TABLES}
        members = await mesh.members()
        try:
            pushes = message_to_dict(await mesh.pushes(members.members))
        except RollmeshError as error:
            pushes = {"unknown": error.message}
        snapshot = await mesh.read_snapshot()
        await mesh.read_sleep(snapshot)
        record = read_record(where.folder) if where.folder is not None else None
        turns = {} if snapshot.turns is None else message_to_dict(snapshot.turns)
        return {
            "tables": tables,
            "holders": holders,
            **message_to_dict(members),
            "pushes": pushes,
            "turns": turns,
            "sleep": snapshot.sleep,
            "placement": record.to_summary() if record is not None else {},
        }
