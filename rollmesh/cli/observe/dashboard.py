"""`rollmesh dashboard`: the page of runs in a browser."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollmesh.cli.options import Mesh, TlsCa, TlsCert, TlsKey, TokenFile, security_of
from rollmesh.mesh.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rollmesh.dashboard.server import RunSource
    from rollmesh.mesh.config.network import SecuritySection


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("dashboard")(_dashboard)


def _dashboard(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN...",
            help="Run folders, several side by side; if left out, the latest one below runs/, preferably in progress.",
        ),
    ] = None,
    mesh: Mesh = None,
    host: Annotated[str, typer.Option("--host", help="Address to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0: a free one.")] = 8760,
    key_file: Annotated[
        Path | None,
        typer.Option("--key-file", help="File with the key of the page; if left out, each start has a key of its own."),
    ] = None,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Show runs in a browser: the mesh in progress, curves, ledger, samples; finished runs; several side by side.

    The page needs no network. It serves this machine alone, unless --host says otherwise; --tls-cert and --tls-key
    then make it HTTPS. Ctrl-C ends it.
    """
    from rollmesh.mesh.access.secret_files import read_key

    key = read_key(key_file, "--key-file") if key_file is not None else ""
    given = {"token_file": token_file, "tls_ca": tls_ca, "tls_cert": tls_cert, "tls_key": tls_key}
    asyncio.run(_serve(runs or [], mesh, host, port, key, security_of(**given)))


async def _serve(runs: list[Path], mesh: str | None, host: str, port: int, key: str, security: SecuritySection) -> None:
    from rollmesh.dashboard.server import page_server
    from rollmesh.launcher.local import handling_signals

    source, title = _source(runs, mesh, security)
    ended = asyncio.Event()
    with handling_signals(lambda _number: ended.set()):
        async with page_server(source, host=host, port=port, key=key, security=security) as url:
            typer.echo(f"{title}: {url}")
            typer.echo("Ctrl-C ends it")
            await ended.wait()


def _source(runs: list[Path], mesh: str | None, security: SecuritySection) -> tuple[RunSource, str]:
    from rollmesh.launcher.mesh_client import MeshClient
    from rollmesh.launcher.page.live_runs import FolderRuns, RemoteRun

    if mesh is not None:
        if runs:
            raise ConfigError("RUN and --mesh exclude each other", hint="give the run folder alone: it knows its mesh")
        return RemoteRun(MeshClient(mesh, security), mesh), f"mesh {mesh}"
    runs = runs or [_latest_run(Path("runs"))]
    named = security if security.token_file is not None else None
    return FolderRuns(runs, named), ", ".join(run.name for run in runs)


def _latest_run(runs: Path) -> Path:
    """The run that has last begun below a folder of runs, preferably one in progress.

    Raises:
        DataError: there is none.
    """
    from rollmesh.run_files import is_in_use, is_run

    found = [folder for folder in runs.glob("*") if is_run(folder)]
    if not found:
        raise DataError(f"there is no run below {runs}/", hint="give run folders, or --mesh host:port")
    return max(found, key=lambda folder: (is_in_use(folder), folder.stat().st_mtime))
