"""`rollmesh status|ledger`: what a mesh says of itself."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from rollmesh.cli.options import Mesh, OptionalRunFolder, Target, TlsCa, TokenFile, target

# Characters; wider than any line of the tables.
_PIPED_WIDTH = 200


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command("status")(_status)
    app.command("ledger")(_ledger)


def _status(
    run: OptionalRunFolder = None, mesh: Mesh = None, token_file: TokenFile = None, tls_ca: TlsCa = None
) -> None:
    """Show the mesh: version, ledger, who waits for whom, members."""
    where = target(run, mesh, token_file, tls_ca)
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


def _ledger(
    run: OptionalRunFolder = None,
    mesh: Mesh = None,
    failed: Annotated[bool, typer.Option("--failed", help="List groups that failed, with their reasons.")] = False,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
) -> None:
    """Recount every group and compare with the counters; exits with 1 where they differ."""
    where = target(run, mesh, token_file, tls_ca)
    if not asyncio.run(_print_ledgers(where, ("train", "eval"), failed_limit=100 if failed else 0)):
        raise typer.Exit(1)


async def _print_ledgers(where: Target, tables: Sequence[str], failed_limit: int) -> bool:
    from rollmesh.launcher.monitor import MeshView

    balanced = True
    async with MeshView(where.address, where.security) as view:
        for table in tables:
            answer = await view.ledger(table, failed_limit)
            typer.echo(f"table {table}")
            for descriptor in answer.counters.DESCRIPTOR.fields:
                if descriptor.name == "reasons":
                    continue
                counted = getattr(answer.counters, descriptor.name)
                typer.echo(f"  {descriptor.name:18} {counted}")
            for reason, count in sorted(answer.counters.reasons.items()):
                typer.echo(f"  {reason:18} {count}")
            for group in answer.failed:
                typer.echo(f"  failed {group.group_id} ({group.task_id}): {group.reason}, {group.attempts} attempt(s)")
            for line in answer.discrepancies:
                typer.echo(f"  DIFFERS: {line}")
            typer.echo("  differs" if answer.discrepancies else "  balances")
            balanced = balanced and not answer.discrepancies
    return balanced
