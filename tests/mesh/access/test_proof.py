"""A member believes the fronts of its own mesh, about its own question, and no one else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rollmesh.mesh.access.credentials import SKEW_S, Credentials
from rollmesh.mesh.access.proof import check_answer, check_challenge, new_challenge, with_proof
from rollmesh.mesh.access.role_grants import MeshKey
from rollmesh.mesh.access.roles import Identity, Role
from rollmesh.mesh.access.secret import parse_secret
from rollmesh.mesh.errors import PayloadError, UnauthenticatedError
from rollmesh.protos import membership_pb2 as pb
from tests.secrets_here import TOKEN

FRONT = parse_secret(TOKEN, "").credentials(Identity(Role.BUFFER))
# A member may have the token, or a grant alone.
MEMBERS = {
    "token": parse_secret(TOKEN, "").credentials(Identity(Role.GENERATOR, "generator-g")),
    "grant": parse_secret(MeshKey(TOKEN).grant_file(Role.GENERATOR), "").credentials(
        Identity(Role.GENERATOR, "generator-g")
    ),
}
Ask = Callable[[], tuple[Any, Any]]
CONFIG = '{"rollout": {"n": 8}}'


def join() -> tuple[pb.JoinRequest, pb.JoinResponse]:
    request = pb.JoinRequest(member_id="generator-g", role=pb.ROLE_GENERATOR, address="a:1", challenge=new_challenge())
    return request, pb.JoinResponse(generation=3, run_config_json=CONFIG, run_name="r", fronts=["b:1", "c:1"])


def heartbeat() -> tuple[pb.HeartbeatRequest, pb.HeartbeatResponse]:
    gauges = {f"gauge_{number}": float(number) for number in range(30)}
    request = pb.HeartbeatRequest(member_id="generator-g", generation=3, gauges=gauges, challenge=new_challenge())
    learner = pb.Member(member_id="learner", address="d:1", gauges={"b": 1.0, "a": 2.0})
    return request, pb.HeartbeatResponse(known=True, learner=learner, fronts=["b:1"])


ASKED = [pytest.param(ask, id=ask.__name__) for ask in (join, heartbeat)]


def sent(message: Any) -> Any:
    """As it arrives on the other side."""
    return type(message).FromString(message.SerializeToString())


def refused(request: Any, answer: Any) -> str:
    with pytest.raises(UnauthenticatedError, match="mesh:1 cannot prove") as caught:
        check_answer(MEMBERS["grant"], request, answer, "mesh:1")
    assert caught.value.exit_code == 2
    assert "token_file" in caught.value.hint
    return str(caught.value)


@pytest.mark.parametrize("ask", ASKED)
@pytest.mark.parametrize("member", MEMBERS.values(), ids=MEMBERS.keys())
@pytest.mark.parametrize("front", ["token", "grant"])
def test_a_front_of_the_mesh_is_believed(ask: Ask, member: Credentials, front: str) -> None:
    held = {"token": TOKEN, "grant": MeshKey(TOKEN).grant_file(Role.BUFFER)}[front]
    request, answer = ask()
    answer = with_proof(parse_secret(held, "").credentials(Identity(Role.BUFFER)), sent(request), answer)
    check_answer(member, request, sent(answer), "mesh:1")


@pytest.mark.parametrize("ask", ASKED)
def test_no_one_else_is(ask: Ask) -> None:
    request, answer = ask()
    assert "no proof" in refused(request, with_proof(None, request, answer))
    other = parse_secret("a token of another mesh altogether", "").credentials(Identity(Role.BUFFER))
    assert "another mesh" in refused(request, with_proof(other, request, answer))
    for role in set(Role) - {Role.BUFFER}:
        answer.ClearField("proof")
        fellow = parse_secret(TOKEN, "").credentials(Identity(role, f"{role}-fellow"))
        assert f"grant is for {role}" in refused(request, with_proof(fellow, request, answer))
    answer.proof = FRONT.claim("rollmesh.v1.Membership")
    assert "no proof" in refused(request, answer)


def test_a_front_whose_grant_is_over_is_not_believed() -> None:
    request, answer = join()
    mesh = MeshKey(TOKEN)
    grant, key = mesh.grant(Role.BUFFER, until=1_000_000.0)
    front = Credentials(mesh.public, grant, key, "", lambda: 999_999.0)
    assert "grant ended" in refused(request, with_proof(front, request, answer))
    member = Credentials(mesh.public, *mesh.grant(Role.GENERATOR), "g", lambda: 1_000_000.0 + SKEW_S - 1)
    check_answer(member, request, with_proof(front, request, answer), "mesh:1")


@pytest.mark.parametrize("ask", ASKED)
def test_a_proof_is_of_one_question_and_one_answer(ask: Ask) -> None:
    request, answer = ask()
    proof = with_proof(FRONT, request, answer).proof
    for changed in ({"fronts": ["evil:1"]}, {"fronts": []}):
        forged = sent(answer)
        del forged.fronts[:]
        forged.MergeFrom(type(answer)(**changed))
        refused(request, forged)
    # The answer to an earlier question, word for word the same but for the challenge.
    again = sent(request)
    again.challenge = new_challenge()
    answer.proof = proof
    refused(again, answer)
    # The other's question.
    again.challenge, again.member_id = request.challenge, "another"
    answer.proof = proof
    refused(again, answer)
    for cut in (proof[:-20], proof[20:], proof.replace("proof-1", "claim-1"), "."):
        answer.proof = cut
        refused(request, answer)


def test_another_configuration_is_refused() -> None:
    request, answer = join()
    with_proof(FRONT, request, answer)
    answer.run_config_json = '{"rollout": {"agent": {"command": ["sh"]}}}'
    refused(request, answer)


def test_another_learner_is_refused() -> None:
    request, answer = heartbeat()
    with_proof(FRONT, request, answer)
    answer.learner.address = "evil:1"
    refused(request, answer)


def test_what_a_later_release_adds_is_proven_too() -> None:
    """Fields that this side does not know stay in what is checked."""
    request, answer = join()
    # Field 100, a text of five bytes.
    later = pb.JoinResponse.FromString(answer.SerializeToString() + b"\xa2\x06\x05later")
    with_proof(FRONT, request, later)
    check_answer(MEMBERS["grant"], request, sent(later), "mesh:1")


def test_a_member_without_a_token_checks_nothing_and_no_one_is_asked_to_sign_much() -> None:
    request, answer = join()
    check_answer(None, request, answer, "mesh:1")
    check_challenge(b"")
    check_challenge(request.challenge)
    with pytest.raises(PayloadError, match="challenge"):
        check_challenge(bytes(1 << 20))
    assert not with_proof(FRONT, pb.JoinRequest(member_id="generator-g"), answer).proof
