"""Role grants: texts that the mesh's key signs, so that another process may act in one role.

A grant is text, `payload.signature`. The payload has a role, a name and the public half of a key. It is signed by the
key that is derived from the mesh's token. A grant's file adds the mesh's public key and the grant's private one.

Invariants: neither the token nor a grant's key is ever sent.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from dataclasses import dataclass
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from rollmesh.mesh.access.roles import Role, id_prefix, parse_member_id
from rollmesh.mesh.errors import UnauthenticatedError

CREDENTIAL_HINT = (
    "set security.token_file (--token-file) to the mesh's token, or to a grant of it (rollmesh token); "
    "`rollmesh run` keeps its own in RUN/token"
)
_GRANT = "rollmesh-grant-1"
# Parts of a grant as its file holds it, and characters of a key in it.
_GRANT_PARTS, _KEY_CHARACTERS = 5, 43


@dataclass(frozen=True)
class RoleGrant:
    """A role that the mesh's token has granted; see the module."""

    role: Role
    # The name that the ids of its members contain; empty: none.
    name: str
    # Unix seconds; `until` 0: no end.
    made: float
    until: float
    key: Ed25519PublicKey
    # As it is sent: payload and signature.
    text: str

    def covers(self, member_id: str) -> bool:
        """True if a member of this id may use it."""
        return parse_member_id(member_id) == (self.role, self.name)

    @property
    def members(self) -> str:
        """The ids that it covers, for the reader."""
        return f"{id_prefix(self.role, self.name)}*"


RoleGrantWithKey = tuple[RoleGrant, Ed25519PrivateKey]


def read_grant(text: str, mesh: Ed25519PublicKey) -> RoleGrant:
    """A grant from its text `payload.signature`.

    Raises:
        UnauthenticatedError: malformed, or not signed by this mesh.
    """
    payload, _, signature = text.partition(".")
    try:
        mesh.verify(decode_base64(signature), f"{_GRANT}.{payload}".encode())
    except InvalidSignature:
        raise UnauthenticatedError("the credential was granted by another mesh", hint=CREDENTIAL_HINT) from None
    # Signed by the mesh, but maybe by another release.
    match unpack_fields(payload):
        case {"role": str(role), "name": str(name), "made": int(made), "until": int(until), "key": str(key)}:
            pass
        case _:
            raise malformed_error()
    try:
        public = Ed25519PublicKey.from_public_bytes(decode_base64(key))
        return RoleGrant(Role(role), name, float(made), float(until), public, text)
    except (ValueError, OverflowError):
        raise malformed_error() from None


class MeshKey:
    """The mesh's token, as the key that grants roles.

    Args:
        token: the secret.
    """

    def __init__(self, token: str) -> None:
        seed = hashlib.sha256(f"rollmesh-mesh-key-1:{token}".encode()).digest()
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public = self._key.public_key()

    def grant(self, role: Role, name: str = "", until: float = 0.0) -> RoleGrantWithKey:
        """A role, with the key that uses it.

        Args:
            name: that the ids of its members say; empty: none.
            until: Unix seconds; 0: no end.
        """
        key, made = Ed25519PrivateKey.generate(), round(time.time())
        fields = {
            "role": role.value,
            "name": name,
            "made": made,
            "until": round(until),
            "key": encode_base64(key.public_key().public_bytes_raw()),
        }
        payload = pack_fields(fields)
        signature = encode_base64(self._key.sign(f"{_GRANT}.{payload}".encode()))
        text = f"{payload}.{signature}"
        return RoleGrant(role, name, float(made), float(round(until)), key.public_key(), text), key

    def grant_file(self, role: Role, name: str = "", until: float = 0.0) -> str:
        """A grant as a token file holds it: its holder may act in that role."""
        grant, key = self.grant(role, name, until)
        mesh = encode_base64(self.public.public_bytes_raw())
        return f"{_GRANT}.{mesh}.{grant.text}.{encode_base64(key.private_bytes_raw())}"


def is_grant(text: str) -> bool:
    """True if the text of a token file is a grant, or the rest of one."""
    return text.startswith(_GRANT) or _GRANT.startswith(text or "-")


def read_grant_file(text: str) -> tuple[Ed25519PublicKey, RoleGrantWithKey]:
    """The mesh and the grant in a file of `MeshKey.grant_file`.

    Raises:
        UnauthenticatedError: it is damaged.
    """
    parts = text.split(".")
    if len(parts) < _GRANT_PARTS or len(parts[-1]) < _KEY_CHARACTERS:
        raise UnauthenticatedError(f"it is cut short, to {len(text)} characters")
    try:
        _, public, payload, signature, private = parts
        mesh = Ed25519PublicKey.from_public_bytes(decode_base64(public))
        return mesh, (
            read_grant(f"{payload}.{signature}", mesh),
            Ed25519PrivateKey.from_private_bytes(decode_base64(private)),
        )
    except ValueError as error:
        raise UnauthenticatedError(str(error)) from error


def pack_fields(fields: dict[str, Any]) -> str:
    """Fields as the part of a credential: JSON in URL-safe base64."""
    return encode_base64(json.dumps(fields, separators=(",", ":")).encode())


def unpack_fields(text: str) -> Any:
    """The JSON that a caller has packed, of any form.

    Raises:
        UnauthenticatedError: no JSON in base64.
    """
    try:
        return json.loads(decode_base64(text))
    except (ValueError, RecursionError):
        raise malformed_error() from None


def encode_base64(data: bytes) -> str:
    """Bytes in URL-safe base64 without padding."""
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def decode_base64(text: str) -> bytes:
    """The bytes of `encode_base64`.

    Raises:
        UnauthenticatedError: of another form.
    """
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except ValueError:
        raise malformed_error() from None


def malformed_error() -> UnauthenticatedError:
    """The error for a credential of another form."""
    return UnauthenticatedError("missing or malformed credential", hint=CREDENTIAL_HINT)
