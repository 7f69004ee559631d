"""What a token file may hold, and what its holder can prove."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.access.credentials import CLAIM_S, SKEW_S, Credentials, Identity, MeshKey, Role, parse_secret
from mesh.errors import ConfigError, UnauthenticatedError
from tests.secrets_here import TOKEN

CONTRACT = "rollmesh.v1.Buffer"


class Clock:
    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


def holder(role: Role = Role.GENERATOR, member_id: str = "a", **granted: object) -> tuple[Credentials, Clock]:
    mesh, clock = MeshKey(TOKEN), Clock()
    grant, key = mesh.grant(role, **granted)  # type: ignore[arg-type]
    return Credentials(mesh.public, grant, key, member_id, clock), clock


@given(role=st.sampled_from(Role), member=st.text(max_size=40), contract=st.text(max_size=40))
def test_a_claim_says_who_made_it(role: Role, member: str, contract: str) -> None:
    ours, _ = holder(role, member)
    theirs, _ = holder(Role.BUFFER)
    assert theirs.check(ours.claim(contract), contract) == Identity(role, member)


@given(at=st.integers(0, 10**6), put=st.characters())
def test_no_character_of_a_claim_can_be_changed(at: int, put: str) -> None:
    ours, _ = holder()
    claim = ours.claim(CONTRACT)
    at %= len(claim)
    changed = claim[:at] + put + claim[at + 1 :]
    # The last character of a base64 text may have bits that mean nothing.
    if changed != claim and at + 1 < len(claim) and claim[at + 1] != ".":
        with pytest.raises(UnauthenticatedError):
            holder(Role.BUFFER)[0].check(changed, CONTRACT)


@given(st.text(max_size=300))
def test_any_other_text_is_no_claim(text: str) -> None:
    with pytest.raises(UnauthenticatedError):
        holder()[0].check(text, CONTRACT)


def test_a_claim_is_used_again_and_renewed_before_it_ends() -> None:
    ours, clock = holder()
    theirs, their_clock = holder(Role.BUFFER)
    first = ours.claim(CONTRACT)
    clock.now += CLAIM_S / 3
    assert ours.claim(CONTRACT) == first
    clock.now += CLAIM_S / 3
    second = ours.claim(CONTRACT)
    assert second != first
    theirs.check(first, CONTRACT)
    their_clock.now += CLAIM_S + SKEW_S + 2
    with pytest.raises(UnauthenticatedError, match="ended"):
        theirs.check(first, CONTRACT)
    theirs.check(second, CONTRACT)


def test_a_claim_ends_with_its_grant() -> None:
    ours, _ = holder(until=time.time() + 60)
    theirs, clock = holder(Role.BUFFER)
    claim = ours.claim(CONTRACT)
    theirs.check(claim, CONTRACT)
    clock.now += 60 + SKEW_S + 2
    with pytest.raises(UnauthenticatedError, match="ended"):
        theirs.check(claim, CONTRACT)


def test_a_grant_serves_its_role_and_name_alone() -> None:
    text = MeshKey(TOKEN).grant_file(Role.GENERATOR, "node1")
    secret = parse_secret(text, "gen.token")
    identity = secret.new_identity(Role.GENERATOR)
    assert identity.member_id.startswith("node1.")
    claim = secret.credentials(identity).claim(CONTRACT)
    assert parse_secret(TOKEN, "").credentials(Identity(Role.BUFFER)).check(claim, CONTRACT) == identity
    assert TOKEN not in text
    for wrong in (Identity(Role.LEARNER, "node1.x"), Identity(Role.GENERATOR, "node2.x")):
        with pytest.raises(ConfigError, match=r"gen\.token"):
            secret.credentials(wrong)
    # A service that holds a grant alone checks its callers all the same.
    learner = parse_secret(TOKEN, "").credentials(Identity(Role.LEARNER)).claim(CONTRACT)
    assert secret.credentials(identity).check(learner, CONTRACT).role is Role.LEARNER


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("short", "at least 32"),
        ("rollmesh-grant-1.x.y.z", "damaged"),
        (MeshKey(TOKEN).grant_file(Role.REWARD)[:-30], "damaged"),
        (MeshKey(TOKEN).grant_file(Role.REWARD).replace("grant-1.", "grant-1.A", 1), "damaged"),
    ],
)
def test_what_is_neither_token_nor_grant_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_secret(text, "file")


def test_a_grant_that_is_over_does_not_start_a_service() -> None:
    secret = parse_secret(MeshKey(TOKEN).grant_file(Role.REWARD, until=time.time() - 2 * SKEW_S), "file")
    with pytest.raises(ConfigError, match="ended"):
        secret.credentials(Identity(Role.REWARD))
