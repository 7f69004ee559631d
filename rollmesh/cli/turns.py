"""`rollmesh yield` and `rollmesh resume`: the learner's turns on devices that it shares with generators."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from rollmesh.cli.options import Mesh, OptionalRunFolder, Target, TlsCa, TlsCert, TlsKey, TokenFile, target
from rollmesh.mesh.errors import UnreachableError


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command("yield")(_yield)
    app.command("resume")(_resume)


def _yield(
    run: OptionalRunFolder = None,
    mesh: Mesh = None,
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
    where = target(run, mesh, token_file=token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key)
    asyncio.run(_ask_to_yield(where, hold_s, timeout_s))
    typer.echo(f"generators have their turn; the learner takes none for {hold_s:g} s, or until `rollmesh resume`")


def _resume(
    run: OptionalRunFolder = None,
    mesh: Mesh = None,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Let the learner take its turns on shared devices again, after `yield`."""
    where = target(run, mesh, token_file=token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key)
    asyncio.run(_ask_to_resume(where))
    typer.echo("the learner takes its turns again")


async def _ask_to_yield(where: Target, hold_s: float, timeout_s: float) -> None:
    from rollmesh.launcher.placement.turns import yield_devices

    address = await _learner(where)
    try:
        await yield_devices(address, where.security, hold_s=hold_s, timeout_s=timeout_s)
    except UnreachableError as error:
        raise UnreachableError(
            error.message, hint="where the learner has heard the request, it stands: see `rollmesh status`"
        ) from error


async def _ask_to_resume(where: Target) -> None:
    from rollmesh.launcher.placement.turns import resume_turns

    await resume_turns(await _learner(where), where.security)


async def _learner(where: Target) -> str:
    from rollmesh.launcher.mesh_client import MeshClient
    from rollmesh.launcher.placement.turns import learner_address

    async with MeshClient(where.address, where.security) as mesh:
        return learner_address((await mesh.members()).members)
