"""`rollmesh status`: what a mesh says of itself."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from rollmesh.cli.options import Mesh, OptionalRunFolder, Target, TlsCa, TlsCert, TlsKey, TokenFile, ended_run, target
from rollmesh.mesh.errors import RollmeshError

# Characters; wider than any line of the tables.
_PIPED_WIDTH = 320


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("status")(_status)


def _status(
    run: OptionalRunFolder = None,
    mesh: Mesh = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as one JSON object.")] = False,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Show the mesh: version, ledger, ages, bytes, waits, stalls, members, weights; of an ended run its summary."""
    if (ended := ended_run(run, mesh)) is not None:
        _show_ended(ended, as_json=as_json)
        return
    where = target(run, mesh, token_file=token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key)
    if as_json:
        typer.echo(json.dumps(asyncio.run(_everything(where)), indent=2))
        return
    from rich.console import Console

    from rollmesh.launcher.console.view import members, pushes, status_table
    from rollmesh.launcher.mesh_monitor import MeshView, Snapshot
    from rollmesh.report.metrics import run_records
    from rollmesh.report.pushes import choices, live_rows

    async def look() -> tuple[Snapshot, list[list[str]], list[str]]:
        async with MeshView(where.address, where.security) as view:
            snapshot = await view.look()
            try:
                reported = await view.pushes(snapshot.members)
                return snapshot, live_rows(reported), choices(reported)
            except RollmeshError as error:
                return snapshot, [], [f"of weights nothing is known: {error.message}"]

    snapshot, rows, said = asyncio.run(look())
    if where.folder is not None:
        snapshot.unscored.note(run_records(where.folder))
    # Piped output is for programs and for grep: no line is cut to the 80 columns that rich would assume.
    console = Console() if sys.stdout.isatty() else Console(width=_PIPED_WIDTH)
    console.print(status_table(snapshot), members(snapshot.members))
    if rows:
        console.print(pushes(rows))
    for line in said:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if snapshot.run_finished:
        console.print("the run has finished")


def _show_ended(run: Path, *, as_json: bool) -> None:
    """The summary of a run that has ended."""
    from rollmesh.report.summary import read_summary

    summary = read_summary(run)
    if as_json:
        typer.echo(json.dumps({"ended": True, "summary": asdict(summary)}, indent=2))
        return
    typer.echo(f"run {run} has ended")
    for line in summary.lines():
        typer.echo(line)


async def _everything(where: Target) -> dict[str, Any]:
    from rollmesh.launcher.mesh_monitor import EVAL, TRAIN, MeshView
    from rollmesh.report.table_lines import plain

    async with MeshView(where.address, where.security) as view:
        tables = {table: plain(await view.describe(table)) for table in (TRAIN, EVAL)}
        holders = {table: plain(await view.holders(table, 0)) for table in (TRAIN, EVAL)}
        members = await view.members()
        try:
            pushes = plain(await view.pushes(members.members))
        except RollmeshError as error:
            pushes = {"unknown": error.message}
        return {"tables": tables, "holders": holders, **plain(members), "pushes": pushes}
