"""The content of a token file: the mesh's token, or one grant of it, alone or in a join string.

Invariants: a process gets a grant of its own role and for its own member id, or an error that names the file. A holder
of the token gets one for any role, under ids of that role alone.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from rollmesh.mesh.access.credentials import Credentials
from rollmesh.mesh.access.join_string import is_join_string, parse_join_string
from rollmesh.mesh.access.role_grants import MeshKey, RoleGrantWithKey, is_grant, read_grant_file
from rollmesh.mesh.access.roles import Identity, Role, new_identity, parse_member_id
from rollmesh.mesh.errors import ConfigError, UnauthenticatedError

# Characters of a mesh's token: its signatures can be checked offline, so it must not be guessable.
TOKEN_CHARACTERS = 32


def new_token() -> str:
    """A new mesh's token."""
    return secrets.token_urlsafe(TOKEN_CHARACTERS)


@dataclass(frozen=True)
class Secret:
    """The content of a token file: the mesh's token, or one grant of it with its key."""

    mesh: Ed25519PublicKey
    # Derived from the mesh's token; None: a grant.
    mesh_key: MeshKey | None
    granted: RoleGrantWithKey | None
    # Names the file in errors.
    source: str

    def credentials(self, identity: Identity | None = None) -> Credentials:
        """The credentials of a process of this role and member; none: as the file makes it, an operator at best.

        Raises:
            ConfigError: as `granted_to`.
        """
        identity = identity or Identity(self.granted[0].role if self.granted else Role.OPERATOR)
        return Credentials(self.mesh, *self.granted_to(identity), identity.member_id)

    def granted_to(self, identity: Identity, clock: Callable[[], float] = time.time) -> RoleGrantWithKey:
        """A grant that a process of this role and member may use, with its key.

        Raises:
            ConfigError: a grant of another role or member, or one that is over.
        """
        granted = self.granted
        if self.mesh_key is not None:
            granted = self.mesh_key.grant(identity.role, parse_member_id(identity.member_id)[1])
        assert granted is not None
        grant, hint = granted[0], f"rollmesh token grant {identity.role} makes one"
        if grant.role is not identity.role:
            raise ConfigError(f"{self.source}: a grant for {grant.role}, and this is {identity.role}", hint=hint)
        if identity.member_id and not grant.covers(identity.member_id):
            raise ConfigError(f"{self.source}: a grant for members {grant.members}, not for {identity.member_id!r}")
        if grant.until and grant.until <= clock():
            raise ConfigError(f"{self.source}: the grant ended {clock() - grant.until:.0f} s ago", hint=hint)
        return granted

    def new_identity(self, role: Role) -> Identity:
        """A role under a new member id that its grant covers."""
        name = self.granted[0].name if self.granted else ""
        return new_identity(role, name)


def parse_secret(text: str, source: str) -> Secret:
    """Parses the text of a token file; a join string is taken for the grant in it.

    Args:
        source: names the file in errors.

    Raises:
        ConfigError: too short to be a token, or a damaged grant or join string.
    """
    if is_join_string(text):
        text = parse_join_string(text, source).grant
    if is_grant(text):
        try:
            mesh, granted = read_grant_file(text)
        except UnauthenticatedError as error:
            raise ConfigError(
                f"{source}: a damaged grant: {error.message}",
                hint="copy the whole line, or make it again: rollmesh token grant ROLE",
            ) from error
        return Secret(mesh, None, granted, source)
    if len(text) < TOKEN_CHARACTERS:
        raise ConfigError(
            f"{source}: the mesh's token has {len(text)} characters, at least {TOKEN_CHARACTERS} are needed",
            hint="make one with: rollmesh token new",
        )
    mesh_key = MeshKey(text)
    return Secret(mesh_key.public, mesh_key, None, source)
