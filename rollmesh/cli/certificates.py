"""`rollmesh certificates`: a mesh's own certificate authority, and certificates of its hosts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.private_files import private_folder, write_new

if TYPE_CHECKING:
    from rollmesh.mesh.access.certificates import CertificateAuthority

AUTHORITY_PEM, _AUTHORITY_KEY = "authority.pem", "authority.key"
_RESERVED = "authority"


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("certificates")(_certificates)


def _certificates(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the authority, made on first use.")],
    holders: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME[=HOST,...]]...",
            help="Certificates to make: a name for the files, and the host names and addresses under which others "
            "reach the holder (its loopback is added); without any, the name is the host.",
        ),
    ] = None,
    days: Annotated[float, typer.Option("--days", min=0.001, help="Days until they end.")] = 365.0,
    renew: Annotated[bool, typer.Option("--renew", help="Replace certificates that are there.")] = False,
) -> None:
    """Make certificates for TLS: FOLDER/NAME.pem with NAME.key, signed by FOLDER/authority.pem.

    Give each service its pair as security.tls_cert and tls_key, and authority.pem as tls_ca. The authority's key stays
    with you. Nodes need none of these files where a join string has them (rollmesh token join --authority FOLDER).
    """
    from rollmesh.mesh.access.certificates import OWN_HOST

    authority = _made_authority(folder)
    for holder in holders or ():
        name, _, hosts = holder.partition("=")
        if not name or name == _RESERVED or Path(name).name != name:
            raise ConfigError(f"{holder!r}: {name!r} cannot name its files", hint="as in node1=10.0.0.7,node1.example")
        issued = authority.issue(name, [*(hosts.split(",") if hosts else [name]), *OWN_HOST], days)
        for path, content, mode in (
            (folder / f"{name}.pem", issued.pem(authority.pem), 0o644),
            (folder / f"{name}.key", issued.key_pem, 0o600),
        ):
            _write(path, content, mode, replace=renew)
            typer.echo(path)


def read_authority(folder: Path) -> CertificateAuthority:
    """The authority of a folder that the command has made.

    Raises:
        ConfigError: there is none.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is no folder: a certificate for a host needs the authority's key",
            hint=f"give the folder with {AUTHORITY_PEM} and {_AUTHORITY_KEY}, as rollmesh certificates makes it",
        )
    from rollmesh.mesh.access.certificates import CertificateAuthority

    return CertificateAuthority.load(folder / AUTHORITY_PEM, folder / _AUTHORITY_KEY)


def read_pem(path: Path) -> bytes:
    """The content of a certificate's file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", hint="rollmesh certificates makes one") from error


def _made_authority(folder: Path) -> CertificateAuthority:
    if (folder / AUTHORITY_PEM).exists():
        return read_authority(folder)
    from rollmesh.mesh.access.certificates import CertificateAuthority

    authority = CertificateAuthority.new()
    try:
        private_folder(folder)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}") from error
    _write(folder / _AUTHORITY_KEY, authority.key_pem, 0o600, replace=False)
    _write(folder / AUTHORITY_PEM, authority.pem, 0o644, replace=False)
    return authority


def _write(path: Path, content: bytes, mode: int, *, replace: bool) -> None:
    """Writes a file that has its mode from the first moment; one that is replaced is the old or the new one."""
    target = path.with_name(f"{path.name}.new") if replace else path
    try:
        write_new(target, content, mode=mode)
        target.replace(path)
    except FileExistsError as error:
        raise ConfigError(f"{target} exists", hint="--renew replaces certificates; or choose another name") from error
    except OSError as error:
        raise ConfigError(f"{target}: {error.strerror}") from error
