"""Credentials, with which a service proves its identity and checks its callers.

A mesh has one secret, its token. An Ed25519 key (RFC 8032) is derived from it. A holder of the token may act in any
role and may grant one. A *grant* names a role and the public half of a key of its own, signed by the mesh's key. It may
also name an end, and a name that begins its members' ids. A call carries a *claim*: the grant, the caller's member id,
the contract that is called and an end, signed by the grant's key. An answer may carry a *proof*: the grant of the
service, and a signature over request and answer.

A member id says its role and the name of its grant: `ROLE-anything`, with a name `ROLE-NAME.anything`. A grant is good
for ids of its own role and name alone. So no other role can take a member's id, while it lives or afterwards. Nothing
has to be remembered for it: a process that starts again and a grant that is renewed are still the same.

Invariants: neither the token nor a grant's key is ever sent. A claim is good for one contract: a reward service cannot
use a generator's at the buffer. It is good for members of its grant and for `CLAIM_S` seconds, whatever end its maker
writes. A service needs no secret to check a claim or a proof, so an attacker in one can speak for no one else.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from rollmesh.mesh.errors import UnauthenticatedError

# Seconds for which a claim is good. An attacker who has read one off the wire can use it that long.
CLAIM_S = 300.0
# Seconds by which the clocks of two hosts may differ.
SKEW_S = 300.0
_GRANT, _CLAIM, _PROOF = "rollmesh-grant-1", "rollmesh-claim-1", "rollmesh-proof-1"


class Role(StrEnum):
    """The role of a caller in the mesh."""

    LEARNER = "learner"
    GENERATOR = "generator"
    REWARD = "reward"
    BUFFER = "buffer"
    # Runs the mesh: may read everything, drain and stop.
    OPERATOR = "operator"
    # Only reads: dashboards, colleagues.
    OBSERVER = "observer"


@dataclass(frozen=True)
class Identity:
    """The identity of a caller: its role and its member id (empty: of no member)."""

    role: Role
    member_id: str = ""


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
        return f"{_id_prefix(self.role, self.name)}*"


def _id_prefix(role: Role, name: str) -> str:
    return f"{role}-{name}." if name else f"{role}-"


def parse_member_id(member_id: str) -> tuple[str, str]:
    """The role and the grant's name that a member id says."""
    role, _, rest = member_id.partition("-")
    name, dot, _ = rest.partition(".")
    return role, name if dot else ""


def new_identity(role: Role, name: str = "") -> Identity:
    """A role under a member id that is unique per process."""
    return Identity(role, f"{_id_prefix(role, name)}{uuid.uuid4().hex[:12]}")


RoleGrantWithKey = tuple[RoleGrant, Ed25519PrivateKey]


def _never_renewed(_held: RoleGrant) -> RoleGrantWithKey | None:
    """A grant that is never replaced."""
    return None


class Credentials:
    """Proves the identity of one process, and checks its callers.

    Args:
        mesh: checks grants.
        grant: of the role in which this process calls.
        key: signs its claims.
        member_id: of this process; empty: none in particular.
        clock: Unix seconds.
        renew: reads the grant that has replaced one, if any has; raises if the grant is over.
    """

    def __init__(
        self,
        mesh: Ed25519PublicKey,
        grant: RoleGrant,
        key: Ed25519PrivateKey,
        member_id: str,
        clock: Callable[[], float] = time.time,
        renew: Callable[[RoleGrant], RoleGrantWithKey | None] = _never_renewed,
    ) -> None:
        self._mesh, self._grant, self._key, self._clock, self._renew = mesh, grant, key, clock, renew
        self.identity = Identity(grant.role, member_id)
        self._claims: dict[str, tuple[str, float]] = {}
        self._known: dict[tuple[str, str], tuple[Identity, float]] = {}

    def grant(self) -> RoleGrant:
        """The one in use.

        Raises:
            UnauthenticatedError: it is over, and nothing has replaced it.
        """
        if (newer := self._renew(self._grant)) is not None:
            self._grant, self._key = newer
            self._claims.clear()
        return self._grant

    def claim(self, contract: str) -> str:
        """The claim that a call of a contract carries, made again when half its time is over.

        Args:
            contract: full name of the gRPC service, as `rollmesh.v1.Buffer`.

        Raises:
            UnauthenticatedError: as `grant`.
        """
        grant, now = self.grant(), self._clock()
        text, until = self._claims.get(contract, ("", 0.0))
        if until - now < CLAIM_S / 2:
            until = now + CLAIM_S
            fields = {"member": self.identity.member_id, "for": contract, "until": round(until)}
            unsigned = f"{_CLAIM}.{grant.text}.{_packed(fields)}"
            text = f"{unsigned}.{_encoded(self._key.sign(unsigned.encode()))}"
            self._claims[contract] = (text, until)
        return text

    def prove(self, content: bytes) -> str:
        """A proof that this process has sent some content."""
        head = f"{_PROOF}.{self._grant.text}"
        return f"{head}.{_encoded(self._key.sign(_proof_input(head, content)))}"

    def check_proof(self, proof: str, content: bytes, role: Role) -> None:
        """Refuses content that no process of a role in this mesh has sent.

        Raises:
            UnauthenticatedError: forged, of another mesh or role, or by a grant that is over.
        """
        head, _, signature = proof.rpartition(".")
        kind, _, text = head.partition(".")
        if kind != _PROOF:
            raise UnauthenticatedError("it sent no proof")
        grant = read_grant(text, self._mesh)
        _check_signature(grant, signature, _proof_input(head, content))
        if grant.role is not role:
            raise UnauthenticatedError(f"its grant is for {grant.role}, not for {role}")
        if grant.until and grant.until + SKEW_S < self._clock():
            raise UnauthenticatedError(f"its grant ended {self._clock() - grant.until:.0f} s ago")

    def check(self, claim: str, contract: str) -> Identity:
        """The identity that made a claim, which came with a call of a contract.

        Raises:
            UnauthenticatedError: forged, of another mesh, for another contract, or over.
        """
        known = self._known.get((claim, contract))
        if known is None:
            known = self._verified(claim, contract)
            if len(self._known) >= _MOST_KNOWN:
                del self._known[next(iter(self._known))]  # The oldest.
            self._known[claim, contract] = known
        identity, until = known
        if until + SKEW_S < self._clock():
            raise UnauthenticatedError(f"the credential ended {self._clock() - until:.0f} s ago", hint=_CLOCKS)
        return identity

    def _verified(self, claim: str, contract: str) -> tuple[Identity, float]:
        parts = claim.split(".")
        if len(parts) != 5 or parts[0] != _CLAIM:
            raise _malformed()
        grant = read_grant(".".join(parts[1:3]), self._mesh)
        _check_signature(grant, parts[4], ".".join(parts[:4]).encode())
        match _unpacked(parts[3]):
            case {"member": str(member), "for": str(asked), "until": int(until) | float(until)}:
                pass
            case _:
                raise _malformed()
        if asked != contract:
            raise UnauthenticatedError(f"a credential for {asked}, not for {contract}")
        # Its maker writes the end, which may be any number: NaN is within no bounds.
        if not 0 <= until <= self._clock() + CLAIM_S + SKEW_S:
            raise UnauthenticatedError(f"the credential does not end within {CLAIM_S:.0f} s", hint=_CLOCKS)
        if member and not grant.covers(member):
            raise UnauthenticatedError(f"a grant for members {grant.members}, used by {member!r}")
        return Identity(grant.role, member), min(until, grant.until) if grant.until else until


def _check_signature(grant: RoleGrant, signature: str, signed: bytes) -> None:
    try:
        grant.key.verify(_decoded(signature), signed)
    except InvalidSignature:
        raise UnauthenticatedError("the credential's signature is wrong", hint=_HINT) from None


def _proof_input(head: str, content: bytes) -> bytes:
    return f"{head}.{hashlib.sha256(content).hexdigest()}".encode()


# Claims that are remembered as checked: those of 1,000 members at six contracts.
_MOST_KNOWN = 8192
_CLOCKS = "do the clocks of the two hosts agree?"
_HINT = (
    "set security.token_file (--token-file) to the mesh's token, or to a grant of it (rollmesh token); "
    "`rollmesh run` keeps its own in RUN/token"
)


def read_grant(text: str, mesh: Ed25519PublicKey) -> RoleGrant:
    """A grant from its text `payload.signature`.

    Raises:
        UnauthenticatedError: malformed, or not signed by this mesh.
    """
    payload, _, signature = text.partition(".")
    try:
        mesh.verify(_decoded(signature), f"{_GRANT}.{payload}".encode())
    except InvalidSignature:
        raise UnauthenticatedError("the credential was granted by another mesh", hint=_HINT) from None
    # Signed by the mesh, but maybe by another release.
    match _unpacked(payload):
        case {"role": str(role), "name": str(name), "made": int(made), "until": int(until), "key": str(key)}:
            pass
        case _:
            raise _malformed()
    try:
        public = Ed25519PublicKey.from_public_bytes(_decoded(key))
        return RoleGrant(Role(role), name, float(made), float(until), public, text)
    except (ValueError, OverflowError):
        raise _malformed() from None


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
            "key": _encoded(key.public_key().public_bytes_raw()),
        }
        payload = _packed(fields)
        signature = _encoded(self._key.sign(f"{_GRANT}.{payload}".encode()))
        text = f"{payload}.{signature}"
        return RoleGrant(role, name, float(made), float(round(until)), key.public_key(), text), key

    def grant_file(self, role: Role, name: str = "", until: float = 0.0) -> str:
        """A grant as a token file holds it: its holder may act in that role."""
        grant, key = self.grant(role, name, until)
        mesh = _encoded(self.public.public_bytes_raw())
        return f"{_GRANT}.{mesh}.{grant.text}.{_encoded(key.private_bytes_raw())}"


# Parts of a grant as its file holds it, and characters of a key in it.
_GRANT_PARTS, _KEY_CHARACTERS = 5, 43


def is_grant(text: str) -> bool:
    """True if the text of a token file is a grant, or the rest of one."""
    return text.startswith(_GRANT) or _GRANT.startswith(text or "-")


def read_grant_file(text: str) -> tuple[Ed25519PublicKey, RoleGrantWithKey]:
    """The mesh and the grant of what `MeshKey.grant_file` has written.

    Raises:
        UnauthenticatedError: it is damaged.
    """
    parts = text.split(".")
    if len(parts) < _GRANT_PARTS or len(parts[-1]) < _KEY_CHARACTERS:
        raise UnauthenticatedError(f"it is cut short, to {len(text)} characters")
    try:
        _, public, payload, signature, private = parts
        mesh = Ed25519PublicKey.from_public_bytes(_decoded(public))
        return mesh, (
            read_grant(f"{payload}.{signature}", mesh),
            Ed25519PrivateKey.from_private_bytes(_decoded(private)),
        )
    except ValueError as error:
        raise UnauthenticatedError(str(error)) from error


class SharedKey:
    """The key of one reward endpoint that is no member of a mesh: it lets callers have items scored there."""

    def __init__(self, key: str) -> None:
        self._key = key

    def claim(self, _contract: str) -> str:
        """See `Credentials.claim`: the key itself, which its endpoint knows anyway."""
        return self._key

    def check(self, claim: str, _contract: str) -> Identity:
        """See `Credentials.check`."""
        if not hmac.compare_digest(claim.encode(), self._key.encode()):
            raise UnauthenticatedError("missing or wrong key", hint="reward.key_files names the file with it")
        return Identity(Role.GENERATOR)


def _packed(fields: dict[str, Any]) -> str:
    return _encoded(json.dumps(fields, separators=(",", ":")).encode())


def _unpacked(text: str) -> Any:
    """The JSON that a caller has packed, of any form."""
    try:
        return json.loads(_decoded(text))
    except (ValueError, RecursionError):
        raise _malformed() from None


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _decoded(text: str) -> bytes:
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except ValueError:
        raise _malformed() from None


def _malformed() -> UnauthenticatedError:
    return UnauthenticatedError("missing or malformed credential", hint=_HINT)
