"""Credentials, with which a service proves its identity and checks its callers.

A mesh has one secret, its token. An Ed25519 key (RFC 8032) is derived from it. A holder of the token may act in any
role and may grant one. A *grant* names a role and the public half of a key of its own, signed by the mesh's key. It may
also name an end, and a name that begins its members' ids. A call carries a *claim*: the grant, the caller's member id,
the contract that is called and an end, signed by the grant's key. An answer may carry a *proof*: the grant of the
service, and a signature over request and answer.

Member ids are in `mesh.access.roles`, grants in `mesh.access.role_grants`.

Invariants: neither the token nor a grant's key is ever sent. A claim is good for one contract: a reward service cannot
use a generator's at the buffer. It is good for members of its grant and for `CLAIM_S` seconds, whatever end its maker
writes. A service needs no secret to check a claim or a proof, so an attacker in one can speak for no one else.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from rollmesh.mesh.access.role_grants import (
    CREDENTIAL_HINT,
    RoleGrant,
    RoleGrantWithKey,
    decode_base64,
    encode_base64,
    malformed_error,
    pack_fields,
    read_grant,
    unpack_fields,
)
from rollmesh.mesh.access.roles import Identity, Role
from rollmesh.mesh.errors import UnauthenticatedError

# Seconds for which a claim is good. An attacker who has read one off the wire can use it that long.
CLAIM_S = 300.0
# Seconds by which the clocks of two hosts may differ: one of them fast, compared with the mesh, the other one slow.
SKEW_S = 600.0
_CLAIM, _PROOF = "rollmesh-claim-1", "rollmesh-proof-1"
# Claims that are remembered as checked: those of 1,000 members at six contracts.
_MOST_KNOWN = 8192
_CLOCKS = "are the clocks of the two hosts right?"


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
        """The grant in use.

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
            unsigned = f"{_CLAIM}.{grant.text}.{pack_fields(fields)}"
            text = f"{unsigned}.{encode_base64(self._key.sign(unsigned.encode()))}"
            self._claims[contract] = (text, until)
        return text

    def prove(self, content: bytes) -> str:
        """A proof that this process has sent some content."""
        head = f"{_PROOF}.{self._grant.text}"
        return f"{head}.{encode_base64(self._key.sign(_proof_input(head, content)))}"

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
            raise malformed_error()
        grant = read_grant(".".join(parts[1:3]), self._mesh)
        _check_signature(grant, parts[4], ".".join(parts[:4]).encode())
        match unpack_fields(parts[3]):
            case {"member": str(member), "for": str(asked), "until": int(until) | float(until)}:
                pass
            case _:
                raise malformed_error()
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
        grant.key.verify(decode_base64(signature), signed)
    except InvalidSignature:
        raise UnauthenticatedError("the credential's signature is wrong", hint=CREDENTIAL_HINT) from None


def _proof_input(head: str, content: bytes) -> bytes:
    return f"{head}.{hashlib.sha256(content).hexdigest()}".encode()


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
