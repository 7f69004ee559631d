"""`rollmesh status`: what a mesh says of itself."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Annotated, Any

import typer

from rollmesh.cli.options import Mesh, OptionalRunFolder, Target, TlsCa, TokenFile, target

# Characters; wider than any line of the tables.
_PIPED_WIDTH = 200


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("status")(_status)


def _status(
    run: OptionalRunFolder = None,
    mesh: Mesh = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as one JSON object.")] = False,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
) -> None:
    """Show the mesh: version, ledger, ages, bytes, who waits for whom, members."""
    where = target(run, mesh, token_file, tls_ca)
    if as_json:
        typer.echo(json.dumps(asyncio.run(_everything(where)), indent=2))
        return
    from rich.console import Console

    from rollmesh.launcher.monitor import MeshView, Snapshot
    from rollmesh.launcher.view import figures, members

    async def look() -> Snapshot:
        async with MeshView(where.address, where.security) as view:
            return await view.look()

    snapshot = asyncio.run(look())
    # Piped output is for programs and for grep: no line is cut to the 80 columns that rich would assume.
    console = Console() if sys.stdout.isatty() else Console(width=_PIPED_WIDTH)
    console.print(figures(snapshot), members(snapshot.members))
    if snapshot.run_finished:
        console.print("the run has finished")


async def _everything(where: Target) -> dict[str, Any]:
    from rollmesh.launcher.monitor import EVAL, TRAIN, MeshView
    from rollmesh.report.table_lines import plain

    async with MeshView(where.address, where.security) as view:
        tables = {table: plain(await view.describe(table)) for table in (TRAIN, EVAL)}
        return {"tables": tables, **plain(await view.members())}
