"""`rollmesh yield` and `rollmesh resume`: the learner's turns on devices that it shares with generators."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from rollmesh.cli.joining import Join
from rollmesh.cli.options import Mesh, OptionalRunFolder, Target, TlsCa, TlsCert, TlsKey, TokenFile, target
from rollmesh.mesh.errors import ConfigError, UnreachableError


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command("yield")(_yield)
    app.command("resume")(_resume)


def _yield(
    run: OptionalRunFolder = None,
    mesh: Mesh = None,
    join: Join = None,
    hold_s: Annotated[
        float, typer.Option("--hold", min=1, max=1e6, help="Seconds for which the learner takes no other turn.")
    ] = 600.0,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=1, help="Seconds to wait for the generators to have the devices.")
    ] = 600.0,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """End the learner's turn on shared devices after its batch: generators have them until `resume`, or for --hold."""
    where = target(run, mesh, join=join, token_file=token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key)
    asyncio.run(_ask_to_yield(where, hold_s, timeout_s))
    typer.echo(f"generators have their turn; the learner takes none for {hold_s:g} s, or until `rollmesh resume`")


def _resume(
    run: OptionalRunFolder = None,
    mesh: Mesh = None,
    join: Join = None,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Let the learner take its turns on shared devices again, after `yield`."""
    where = target(run, mesh, join=join, token_file=token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key)
    asyncio.run(_ask_to_resume(where))
    typer.echo("the learner takes its turns again")


async def _ask_to_yield(where: Target, hold_s: float, timeout_s: float) -> None:
    from rollmesh.launcher.placement.turns import yield_devices

    address = await _learner(where)
    try:
        with _nothing_shared(where):
            await yield_devices(address, where.security, hold_s=hold_s, timeout_s=timeout_s)
    except UnreachableError as error:
        raise UnreachableError(
            error.message, hint="where the learner has heard the request, it stands: see `rollmesh status`"
        ) from error


async def _ask_to_resume(where: Target) -> None:
    from rollmesh.launcher.placement.turns import resume_turns

    address = await _learner(where)
    with _nothing_shared(where):
        await resume_turns(address, where.security)


@contextmanager
def _nothing_shared(where: Target) -> Iterator[None]:
    """Explains the refusal of a learner that has its devices for itself, as in a trial of `placement: auto`."""
    try:
        yield
    except ConfigError as error:
        if type(error) is not ConfigError:
            raise
        from rollmesh.launcher.trials.record import read_record

        record = read_record(where.folder) if where.folder is not None else None
        present = f" Now: {record.text}" if record is not None else ""
        raise ConfigError(
            error.message, hint=f"generators have their own as well, so there is nothing to yield.{present}"
        ) from error


async def _learner(where: Target) -> str:
    from rollmesh.launcher.learner_requests import learner_address
    from rollmesh.launcher.mesh_client import MeshClient

    async with MeshClient(where.address, where.security) as mesh:
        return learner_address((await mesh.members()).members)
