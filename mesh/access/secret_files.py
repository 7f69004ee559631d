"""Checks files with secrets before any service starts that needs them later.

Invariants: a service that begins can read all that its options name. A configuration may serve several hosts, so a file
that the service does not use is not checked: it may lie elsewhere.
"""

from __future__ import annotations

from pathlib import Path

from rollmesh.mesh.access.roles import Identity
from rollmesh.mesh.access.tls import channel_credentials, client_credentials, server_context
from rollmesh.mesh.access.token_file import credentials_of
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.private_files import read_secret


def check_security(security: SecuritySection, identity: Identity | None, *, endpoint: bool) -> None:
    """Refuses files of a host's `security` that its services cannot use.

    Args:
        identity: of the service; None: of several, which share the mesh's token.
        endpoint: one of them serves the endpoint.

    Raises:
        ConfigError: a file that cannot be read or used, or is open to others.
    """
    credentials_of(security, identity)
    server_context(security)
    channel_credentials(security)
    keys = {"metrics_key_file": security.metrics_key_file}
    if endpoint:
        keys["endpoint_key_file"] = security.endpoint_key_file
    for name, path in keys.items():
        if path is not None:
            read_key(path, f"security.{name}")
    if security.telemetry_key_file is not None:
        read_secret(security.telemetry_key_file, "security.telemetry_key_file")


def check_keys(config: Config) -> None:
    """Refuses files with keys of other servers that generators cannot use.

    Raises:
        ConfigError: as `check_security`.
    """
    for address, path in config.reward.key_files.items():
        read_secret(path, f"reward.key_files.{address}")
    for address, tls in config.reward.tls.items():
        client_credentials(tls.ca, tls.cert, tls.key, f"reward.tls.{address}.")
    if (key_file := config.rollout.sglang.key_file) is not None:
        read_secret(key_file, "rollout.sglang.key_file")


def read_key(path: Path, setting: str) -> str:
    """A key that the mesh's own services ask for.

    Args:
        setting: the configuration key that names the file, for errors.

    Raises:
        ConfigError: it cannot be read, is empty, or is open to others.
    """
    return read_secret(path, setting, how=f"rollmesh token new --out {path} makes one")
