"""`rollmesh token`: secrets of a mesh, grants of one role for other hosts, and join strings."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Annotated

import typer

from rollmesh.cli.certificates import AUTHORITY_PEM, read_authority, read_pem
from rollmesh.mesh.access.join_string import JoinString
from rollmesh.mesh.access.roles import Role
from rollmesh.mesh.access.secret import new_token, parse_secret
from rollmesh.mesh.addresses import addresses_of, host_of
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.private_files import read_secret, write_new
from rollmesh.mesh.runtime.hosts import is_loopback

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SPAN = re.compile(r"([1-9][0-9]*)([mhd])")
_UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0}
_Out = Annotated[
    Path | None,
    typer.Option("--out", help="File to write, readable only for its owner (0600); if left out, it is printed."),
]
_Run = Annotated[Path | None, typer.Argument(metavar="[RUN]", help="Run folder, whose mesh's token it is.")]
_TokenFile = Annotated[Path | None, typer.Option("--token-file", help="The mesh's token.")]
_Name = Annotated[
    str, typer.Option("--name", help="Name in the ids of the members that may use it: ROLE-NAME.anything.")
]
_Expires = Annotated[
    str | None, typer.Option("--expires", metavar="30m|12h|7d", help="Time until it ends; never, if left out.")
]

app = typer.Typer(name="token", help="Make a token, a grant of one role, or a join string.", no_args_is_help=True)


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
    run: _Run = None,
    token_file: _TokenFile = None,
    name: _Name = "",
    expires: _Expires = None,
    out: _Out = None,
) -> None:
    """Make a grant: a token file whose holder may act in one role of the mesh, and in no other.

    The mesh's token is the one of a run folder (RUN/token), or of --token-file.
    """
    _deliver(_granted(role, run, token_file, name, expires), out)


@app.command("join")
def _join(
    role: Annotated[Role, typer.Argument(help="Role of the node.")],
    run: _Run = None,
    mesh: Annotated[
        str | None,
        typer.Option("--mesh", metavar="HOST:PORT,...", help="Address of the mesh; that of RUN, if left out."),
    ] = None,
    token_file: _TokenFile = None,
    name: _Name = "",
    expires: _Expires = None,
    authority: Annotated[
        Path | None,
        typer.Option(
            "--authority",
            metavar="FOLDER|PEM",
            help="Certificate authority of a mesh with TLS: a folder of `rollmesh certificates`, or its certificate.",
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            "--host",
            metavar="HOST[:PORT],...",
            help="Where others reach the node, the first one advertised: it then listens for them, with a certificate "
            "for all of them if the mesh has TLS.",
        ),
    ] = None,
    out: _Out = None,
) -> None:
    """Make a join string: the mesh's address, a grant and the fingerprint of its authority, all that a node needs.

    On the node: `rollmesh generator --join FILE`. Other services and `rollmesh status` take it too.
    """
    from rollmesh.launcher.folder import read_mesh
    from rollmesh.mesh.access.certificates import OWN_HOST, fingerprint_of

    if mesh is None:
        if run is None:
            raise ConfigError("give a run folder, or --mesh and --token-file")
        mesh = read_mesh(run)
    fingerprint, certificate = b"", None
    hosts = host.split(",") if host else []
    if authority is not None:
        pem = authority / AUTHORITY_PEM if authority.is_dir() else authority
        fingerprint = fingerprint_of(read_pem(pem), f"--authority {pem}")
        if hosts:
            certificate = read_authority(authority).issue(name or role, [*map(host_of, hosts), *OWN_HOST])
    join = JoinString(
        mesh=",".join(addresses_of(mesh)),
        grant=_granted(role, None if token_file else run, token_file, name, expires),
        authority=fingerprint,
        host=hosts[0] if hosts else "",
        certificate=certificate,
    )
    _deliver(join.pack(), out)
    if all(is_loopback(host_of(address)) for address in addresses_of(mesh)):
        typer.echo("note: this mesh is on loopback, so only this host can reach it", err=True)
    elif not fingerprint:
        typer.echo("note: without --authority the node uses no TLS: others can read its traffic", err=True)


def _granted(role: Role, run: Path | None, token_file: Path | None, name: str, expires: str | None) -> str:
    """A grant by the mesh's token, which is that of a run folder or of a file."""
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
    return secret.mesh_key.grant_file(role, name, until)


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
        write_new(out, f"{secret}\n".encode())
    except FileExistsError as error:
        raise ConfigError(f"--out {out} exists", hint="remove it first, or choose another name") from error
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}") from error
