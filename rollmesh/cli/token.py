"""`rollmesh token`: secrets of a mesh, and grants of one role for other hosts."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Annotated

import typer

from rollmesh.cli.options import OptionalRunFolder
from rollmesh.mesh.access.roles import Role
from rollmesh.mesh.access.secret import new_token, parse_secret
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.private_files import read_secret

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SPAN = re.compile(r"([1-9][0-9]*)([mhd])")
_UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0}
_Out = Annotated[
    Path | None,
    typer.Option("--out", help="File to write, readable only for its owner (0600); if left out, it is printed."),
]

app = typer.Typer(name="token", help="Make a mesh's token, or a grant for one role.", no_args_is_help=True)


def register(parent: typer.Typer) -> None:
    """Adds `rollmesh token` to the command tree."""
    parent.add_typer(app)


@app.command("new")
def _new(out: _Out = None) -> None:
    """Make a token for a new mesh: who has it may do everything, and grant roles."""
    _deliver(new_token(), out)


@app.command("grant")
def _grant(
    role: Annotated[Role, typer.Argument(help="Role of its holder.")],
    run: OptionalRunFolder = None,
    token_file: Annotated[Path | None, typer.Option("--token-file", help="The mesh's token.")] = None,
    name: Annotated[
        str, typer.Option("--name", help="Name in the ids of the members that may use it: ROLE-NAME.anything.")
    ] = "",
    expires: Annotated[
        str | None, typer.Option("--expires", metavar="30m|12h|7d", help="Time until it ends; never, if left out.")
    ] = None,
    out: _Out = None,
) -> None:
    """Make a grant: a token file whose holder may act in one role of the mesh, and in no other.

    The mesh's token is the one of a run folder (RUN/token), or of --token-file.
    """
    from rollmesh.launcher.run_secrets import TOKEN

    if (run is None) == (token_file is None):
        raise ConfigError("give a run folder or --token-file, one of them")
    path = token_file or Path(str(run)) / TOKEN
    secret = parse_secret(
        read_secret(path, "--token-file", how=f"rollmesh token new --out {path} makes one"), str(path)
    )
    if secret.mesh_key is None:
        raise ConfigError(f"{path} is itself a grant", hint="only the mesh's token can grant roles")
    if name and not _NAME.fullmatch(name):
        raise ConfigError(f"--name {name!r}: letters, digits, - and _ only, 64 at most")
    until = time.time() + _seconds(expires) if expires else 0.0
    _deliver(secret.mesh_key.grant_file(role, name, until), out)


def _seconds(span: str) -> float:
    found = _SPAN.fullmatch(span)
    if found is None:
        raise ConfigError(f"--expires {span!r}", hint="as in 30m, 12h or 7d")
    return float(found[1]) * _UNITS[found[2]]


def _deliver(secret: str, out: Path | None) -> None:
    if out is None:
        typer.echo(secret)
        return
    try:
        with os.fdopen(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{secret}\n")
    except FileExistsError as error:
        raise ConfigError(f"--out {out} exists", hint="remove it first, or choose another name") from error
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}") from error
