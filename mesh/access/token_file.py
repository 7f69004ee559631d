"""The identity of a process and the grant that proves it, both read from its token file.

Invariants: a grant's file is checked again every few seconds, and at once when the grant is over. A grant that has
replaced it is used if it is of the same mesh, and for this role and member. Otherwise the former grant stays in use to
its end, and the log says why. The mesh's token itself is read once: it cannot change while the mesh runs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from rollmesh.mesh.access.credentials import Credentials
from rollmesh.mesh.access.role_grants import RoleGrant, RoleGrantWithKey
from rollmesh.mesh.access.roles import Identity, Role, new_identity
from rollmesh.mesh.access.secret import Secret, parse_secret
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import ConfigError, UnauthenticatedError
from rollmesh.mesh.private_files import read_secret

log = logging.getLogger(__name__)
# Seconds between two checks of a grant's file.
CHECK_INTERVAL_S = 5.0
# The part of a grant's life at which its holder begins to warn.
_LAST_PART = 0.1
# Seconds until a member's grant ends, among the gauges of its heartbeats.
GRANT_GAUGE = "grant_seconds_left"
# The state of each grant's file when this process last logged it: all its credentials check for themselves.
_logged_stamps: dict[Path, object] = {}
_NEVER = object()


def secret_of(security: SecuritySection) -> Secret | None:
    """The mesh's token, or a grant of it; None where the mesh has none.

    Raises:
        ConfigError: its file cannot be read, is open to others, or holds neither.
    """
    return None if security.token_file is None else _read(security.token_file)


def identity_of(security: SecuritySection, role: Role) -> Identity:
    """A role under a new member id, as a grant of the token file requires.

    Raises:
        ConfigError: as `secret_of`.
    """
    secret = secret_of(security)
    return secret.new_identity(role) if secret is not None else new_identity(role)


def credentials_of(
    security: SecuritySection, identity: Identity | None = None, clock: Callable[[], float] = time.time
) -> Credentials | None:
    """The credentials of a process of this role and member; None if the mesh has no token.

    Args:
        identity: none: as the token file makes it.
        clock: Unix seconds.

    Raises:
        ConfigError: as `secret_of`, or a grant for others, or one that is over.
    """
    path = security.token_file
    if path is None:
        return None
    stamp = _stamp(path)
    secret = _read(path)
    if secret.granted is None:
        return secret.credentials(identity)
    identity = identity or Identity(secret.granted[0].role)
    file = _GrantFile(path, secret, identity, stamp, clock)
    return Credentials(secret.mesh, *secret.granted_to(identity, clock), identity.member_id, clock, file.read_newer)


class Expiry:
    """Warns once of each grant that ends soon.

    Args:
        credentials: of this process; None: it needs none.
        clock: Unix seconds.
    """

    def __init__(self, credentials: Credentials | None, clock: Callable[[], float] = time.time) -> None:
        self._credentials, self._clock = credentials, clock
        self._warned_of = ""

    def gauges(self) -> dict[str, float]:
        """The gauge that heartbeats report; empty if the grant has no end.

        Raises:
            UnauthenticatedError: it is over, and nothing has replaced it.
        """
        grant = None if self._credentials is None else self._credentials.grant()
        if grant is None or not grant.until:
            return {}
        left_s = grant.until - self._clock()
        if left_s < _LAST_PART * (grant.until - grant.made) and self._warned_of != grant.text:
            self._warned_of = grant.text
            log.warning("this service's grant ends in %.0f s: put a new one into security.token_file before", left_s)
        return {GRANT_GAUGE: left_s}


class _GrantFile:
    def __init__(
        self, path: Path, first: Secret, identity: Identity, stamp: object, clock: Callable[[], float]
    ) -> None:
        self._path, self._mesh, self._identity, self._clock = path, first.mesh, identity, clock
        self._stamp = stamp
        self._next_check_at = clock() + CHECK_INTERVAL_S

    def read_newer(self, held: RoleGrant) -> RoleGrantWithKey | None:
        """The grant that the file holds now, if it has replaced the held one."""
        now = self._clock()
        over = 0.0 < held.until <= now
        if now < self._next_check_at and not over:
            return None
        self._next_check_at = now + CHECK_INTERVAL_S
        found = self._read_replacement()
        if found is None and over:
            raise UnauthenticatedError(
                f"security.token_file {self._path}: the grant ended {now - held.until:.0f} s ago",
                hint=f"put a new one into the file (rollmesh token grant {held.role}), "
                "and restart the services that have ended since",
            )
        return found

    def _read_replacement(self) -> RoleGrantWithKey | None:
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return None
        self._stamp = stamp
        try:
            secret = _read(self._path)
            if secret.mesh != self._mesh:
                raise ConfigError(
                    f"security.token_file {self._path} is of another mesh now",
                    hint="a mesh's token cannot change while it runs: stop the mesh first",
                )
            found = secret.granted_to(self._identity, self._clock)
        except ConfigError as error:
            self._log_once(logging.ERROR, f"the former grant stays in use: {error}")
            return None
        self._log_once(logging.INFO, f"security.token_file {self._path} has been replaced: its new grant is in use")
        return found

    def _log_once(self, level: int, what: str) -> None:
        if _logged_stamps.get(self._path, _NEVER) != self._stamp:
            _logged_stamps[self._path] = self._stamp
            log.log(level, what)


def _read(path: Path) -> Secret:
    how = (
        "make one with rollmesh token new --out FILE, or token grant ROLE; security.token_file or --token-file names it"
    )
    return parse_secret(read_secret(path, "security.token_file", how=how), f"security.token_file {path}")


def _stamp(path: Path) -> object:
    """A value that changes with the file and with the rights to it; None without a file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns, status.st_size
