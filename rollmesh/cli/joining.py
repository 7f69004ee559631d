"""`--join`: a node's settings from a join string, which a file or an environment variable holds."""

from __future__ import annotations

import atexit
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from rollmesh.mesh.access.join_string import JoinString, is_join_string, parse_join_string
from rollmesh.mesh.addresses import addresses_of, host_of
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.network import NetworkSection, SecuritySection
from rollmesh.mesh.config.variables import option_variable
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.private_files import read_secret, write_new

Join = Annotated[
    str | None,
    typer.Option(
        "--join",
        metavar="FILE",
        envvar=option_variable("join"),
        help="File with a join string (rollmesh token join): the mesh's address, a grant, and the fingerprint of its "
        "certificate authority. The variable may hold the string itself.",
    ),
]
_ALL_IPV4, _ALL_IPV6 = "0.0.0.0", "::"  # noqa: S104  who joins has a grant; without one such a bind is refused
_SCRATCH = "rollmesh-join-"
# As a service retries a mesh that does not answer.
_RETRY_S = NetworkSection().retry_s


class JoinedNode:
    """The settings of a process that a join string brings into a mesh.

    Args:
        join: the string.
        mesh: address that goes before the string's.
        security: token and TLS.

    Attributes:
        mesh: address of the mesh.
        security: as given.
        host: to bind; None: others do not call this node.
        advertise: under which others reach it; None: as bound.
    """

    def __init__(self, join: JoinString, mesh: str | None, security: SecuritySection) -> None:
        self.mesh, self.security = mesh or join.mesh, security
        self.advertise = join.host or None
        self.host = (_ALL_IPV6 if ":" in host_of(join.host) else _ALL_IPV4) if join.host else None

    def network(self, network: NetworkSection) -> NetworkSection:
        """The section for this node; what the configuration says itself stays."""
        found = {"host": self.host, "advertise": self.advertise}
        unsaid = found.keys() - network.model_fields_set
        return network.model_copy(update={name: found[name] for name in unsaid if found[name] is not None})


def join_of(
    given: str | None, mesh: str | None, security: SecuritySection, *, retry_s: float = _RETRY_S
) -> JoinedNode | None:
    """The node that `--join` describes; None without it. Its files are removed as the process ends.

    Args:
        given: value of the option.
        mesh: value of `--mesh`, which goes before the string's.
        security: settings that go before those of the string.
        retry_s: seconds for which a mesh that does not answer is asked again.

    Raises:
        ConfigError: the string stands on the command line, cannot be read, or is damaged.
        UnauthenticatedError: the mesh has another certificate authority.
        UnreachableError: the mesh does not answer, so that its authority is not known.
    """
    if given is None:
        return None
    join, file = _read(given)
    authority = b""
    if join.authority:
        from rollmesh.mesh.access.pinned_authority import fetch_authority

        authority = fetch_authority(addresses_of(mesh or join.mesh), join.authority, retry_s=retry_s)
    settings = _files(join, authority) if authority or file is None else {}
    if file is not None:
        settings["token_file"] = file  # read again where it is replaced, as any grant's
    said = {name: value for name, value in dict(security).items() if value is not None}
    return JoinedNode(join, mesh, SecuritySection.model_validate({**settings, **said}))


def joined_config(given: str | None, mesh: str | None, config: Config) -> tuple[Config, str | None]:
    """The configuration of a service on a node, and the address of its mesh (see `join_of`)."""
    node = join_of(given, mesh, config.security)
    if node is None:
        return config, mesh
    return config.model_copy(update={"security": node.security, "network": node.network(config.network)}), node.mesh


def required(mesh: str | None) -> str:
    """The address of the mesh.

    Raises:
        ConfigError: neither option names it.
    """
    if mesh is None:
        raise ConfigError("give --mesh HOST:PORT, or --join FILE", hint="`rollmesh token join` writes such a file")
    return mesh


def by_variables_alone(mesh: str | None, join: str | None) -> bool:
    """True if a command was given its mesh by environment variables, and not by its command line."""
    given = {"mesh": mesh, "join": join}
    return any(given.values()) and all(value is None or _is_variable(name, value) for name, value in given.items())


def _is_variable(option: str, value: str) -> bool:
    return os.environ.get(option_variable(option)) == value


def _read(given: str) -> tuple[JoinString, Path | None]:
    """The join string, and the file that holds it."""
    variable = option_variable("join")
    if not is_join_string(given):
        path = Path(given)
        text = read_secret(path, "--join", how="rollmesh token join ROLE --out FILE makes one")
        return parse_join_string(text, f"--join {path}"), path
    if not _is_variable("join", given):
        raise ConfigError(
            "--join: a command line can be read by every user of this host, and a join string is a secret",
            hint=f"write it to a file: (umask 077; cat > node.join), then --join node.join; or set {variable}",
        )
    return parse_join_string(given, variable), None


def _files(join: JoinString, authority: bytes) -> dict[str, Path]:
    """Writes the contents of a join string to files that no other user reads; returns them by their settings."""
    from rollmesh.mesh.runtime.scratch_folder import scratch_folder

    contents = {"token_file": join.grant.encode()}
    if authority:
        contents["tls_ca"] = authority
    if join.certificate is not None:
        contents |= {"tls_cert": join.certificate.pem(authority), "tls_key": join.certificate.key_pem}
    until_exit = ExitStack()
    atexit.register(until_exit.close)
    folder = until_exit.enter_context(scratch_folder(_SCRATCH))
    for name, content in contents.items():
        write_new(folder / name, content)
    return {name: folder / name for name in contents}
