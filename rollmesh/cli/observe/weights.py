"""`rollmesh weights verify`: every generator compared with the learner."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollmesh.cli.joining import Join
from rollmesh.cli.observe.table_console import table_console
from rollmesh.cli.options import Mesh, OptionalRunFolder, TlsCa, TlsCert, TlsKey, TokenFile, target

if TYPE_CHECKING:
    from rollmesh.verification.compare import Comparison


def register(app: typer.Typer) -> None:
    """Adds the command."""
    weights = typer.Typer(help="Compare the weights that generators serve with the learner's.", no_args_is_help=True)
    weights.callback()(_weights)
    weights.command("verify")(_verify)
    app.add_typer(weights, name="weights")


def _weights() -> None:
    """Without this, the only command of the group would take the group's name."""


def _verify(
    run: OptionalRunFolder = None,
    mesh: Mesh = None,
    join: Join = None,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", help="Text to probe with; token ids from the whole vocabulary, if left out."),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance", min=0.0, help="Largest difference of a log-prob, in nats; depends on the dtype, if left out."
        ),
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=1.0, help="Seconds to wait for versions that can be compared.")
    ] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Compare every generator with the learner: version, digest of what is in its engine, log-probs of a probe.

    The learner's weights are fetched and run on this machine's CPU. Exits with 1 where a generator differs or could not
    be compared.
    """
    where = target(run, mesh, join=join, token_file=token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key)
    from rollmesh.verification.compare import compare

    comparison = asyncio.run(
        compare(where.address, where.security, timeout_s=timeout_s, prompt=prompt, tolerance=tolerance)
    )
    if as_json:
        typer.echo(json.dumps(_as_json(comparison), indent=1))
    else:
        _print(comparison)
    if not comparison.verified:
        raise typer.Exit(1)


def _as_json(comparison: Comparison) -> dict[str, Any]:
    generators = [
        {**asdict(verdict), "policy": str(verdict.policy) if verdict.policy else None}
        for verdict in comparison.verdicts
    ]
    return {"verified": comparison.verified, "learner": comparison.learner, "generators": generators}


def _print(comparison: Comparison) -> None:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, title=f"compared with {comparison.learner}", title_justify="left")
    for name in ("generator", "outcome", "version", "digest", "log-probs differ by", "what"):
        table.add_column(name, overflow="fold")
    for verdict in comparison.verdicts:
        largest = verdict.largest_difference
        table.add_row(
            verdict.member_id,
            verdict.outcome,
            str(verdict.policy or "-"),
            verdict.digest or "-",
            "-" if largest is None else f"{largest:.2g}",
            verdict.why or "-",
        )
    console = table_console()
    console.print(table)
    if not comparison.verdicts:
        console.print("no generator is in the mesh")
