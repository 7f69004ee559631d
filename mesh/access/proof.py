"""Proof of the mesh to its members that it is the mesh, with TLS or without.

A request carries a challenge; the front signs the request and its answer by its grant (`Credentials.prove`).

Invariants: a member with credentials uses an answer of Join or Heartbeat only if a front of its mesh gave it to this
very request. A front without credentials proves nothing, and a member without any checks nothing.
"""

from __future__ import annotations

import secrets
from typing import TypeVar

from rollmesh.mesh.access.credentials import Credentials
from rollmesh.mesh.access.roles import Role
from rollmesh.mesh.errors import PayloadError, UnauthenticatedError
from rollmesh.protos import membership_pb2 as pb

_CHALLENGE_BYTES = 32
Request = pb.JoinRequest | pb.HeartbeatRequest
Answer = TypeVar("Answer", pb.JoinResponse, pb.HeartbeatResponse)


def new_challenge() -> bytes:
    """Random bytes, to which no earlier answer can have been given."""
    return secrets.token_bytes(_CHALLENGE_BYTES)


def with_proof(credentials: Credentials | None, request: Request, answer: Answer) -> Answer:
    """An answer with its front's proof, where that was asked for."""
    if credentials is not None and request.challenge:
        answer.proof = credentials.prove(_signed_content(request, answer))
    return answer


def check_challenge(challenge: bytes) -> None:
    """Refuses one of another length; none is right, too.

    Raises:
        PayloadError: it is not as `new_challenge` makes it.
    """
    if len(challenge) not in (0, _CHALLENGE_BYTES):
        raise PayloadError("challenge", f"expected {_CHALLENGE_BYTES} bytes, got {len(challenge)}")


def check_answer(credentials: Credentials | None, request: Request, answer: Answer, mesh: str) -> None:
    """Refuses an answer that no front of this mesh has given to this request.

    Args:
        credentials: of the member.
        mesh: names the mesh's addresses.

    Raises:
        UnauthenticatedError: another program answers, or a front that has another token or none.
    """
    if credentials is None:
        return
    proof = answer.proof
    answer.ClearField("proof")
    try:
        credentials.check_proof(proof, _signed_content(request, answer), Role.BUFFER)
    except UnauthenticatedError as error:
        raise UnauthenticatedError(
            f"the service at {mesh} cannot prove that it belongs to this mesh: {error.message}",
            hint="either its security.token_file is of another mesh or missing, or another program answers in its "
            "place; nothing of the answer was used",
        ) from error


def _signed_content(request: Request, answer: pb.JoinResponse | pb.HeartbeatResponse) -> bytes:
    asked = request.SerializeToString(deterministic=True)
    name = answer.DESCRIPTOR.full_name.encode()
    return b"%s %d %s%s" % (name, len(asked), asked, answer.SerializeToString(deterministic=True))
