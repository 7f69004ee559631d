"""Proofs that the holder of a grant can make."""

from __future__ import annotations

import base64
import contextlib
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.mesh.access.credentials import CLAIM_S, SKEW_S, Credentials
from rollmesh.mesh.access.role_grants import MeshKey
from rollmesh.mesh.access.roles import Role, new_identity
from rollmesh.mesh.errors import UnauthenticatedError
from tests.secrets_here import TOKEN

CONTRACT = "rollmesh.v1.Buffer"


class Clock:
    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


def holder(role: Role = Role.GENERATOR, member_id: str = "generator-a", **granted: object) -> tuple[Credentials, Clock]:
    mesh, clock = MeshKey(TOKEN), Clock()
    grant, key = mesh.grant(role, **granted)  # type: ignore[arg-type]
    return Credentials(mesh.public, grant, key, member_id, clock), clock


ROLES = st.sampled_from(Role)
NAMES = st.text("az09_-", max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=9,
)


@given(role=ROLES, name=NAMES, contract=st.text(max_size=40))
def test_a_claim_says_who_made_it(role: Role, name: str, contract: str) -> None:
    who = new_identity(role, name)
    ours, _ = holder(role, who.member_id, name=name)
    theirs, _ = holder(Role.BUFFER)
    assert theirs.check(ours.claim(contract), contract) == who


@given(of=st.tuples(ROLES, NAMES), other=st.tuples(ROLES, NAMES), rest=st.text(max_size=20))
def test_no_two_grants_of_other_roles_or_names_cover_one_id(
    of: tuple[Role, str], other: tuple[Role, str], rest: str
) -> None:
    mesh = MeshKey(TOKEN)
    assert mesh.grant(*of)[0].covers(new_identity(*of).member_id)
    for member_id in (new_identity(*of).member_id, f"{of[0]}-{rest}", f"{of[0]}-{of[1]}.{rest}", rest):
        covering = {each for each in (of, other) if mesh.grant(*each)[0].covers(member_id)}
        assert len(covering) <= 1


def claimed(ours: Credentials, payload: bytes) -> str:
    """A claim that says anything at all, signed as it must be."""
    kind, *grant, _, _ = ours.claim(CONTRACT).split(".")
    unsigned = ".".join([kind, *grant, base64.urlsafe_b64encode(payload).decode().rstrip("=")])
    signature = ours._key.sign(unsigned.encode())
    return f"{unsigned}.{base64.urlsafe_b64encode(signature).decode().rstrip('=')}"


@given(
    member=JSON | st.sampled_from(["", "generator-b"]),
    asked=JSON | st.just(CONTRACT),
    until=JSON | st.floats() | st.floats(min_value=0) | st.integers(0, 10**12),
    payload=JSON,
)
def test_whatever_a_holder_signs_is_refused_or_ends_in_time(member: Any, asked: Any, until: Any, payload: Any) -> None:
    ours, clock = holder()
    theirs, their_clock = holder(Role.BUFFER)
    for said in (payload, {"member": member, "for": asked, "until": until}):
        claim = claimed(ours, json.dumps(said).encode())
        their_clock.now = clock.now
        with contextlib.suppress(UnauthenticatedError):
            theirs.check(claim, CONTRACT)
        their_clock.now += CLAIM_S + 2 * SKEW_S + 1
        with pytest.raises(UnauthenticatedError):
            theirs.check(claim, CONTRACT)


ENDS = {
    "not a number": "NaN",
    "its name": '"nan"',
    "never": "Infinity",
    "too large a number": "1e400",
    "a large number": f"1{'0' * 400}",
    "long before": f"-1{'0' * 400}",
    "in a day": time.time() + 86400,
}
REFUSED = {
    **{name: f'{{"member": "generator-a", "for": "{CONTRACT}", "until": {end}}}' for name, end in ENDS.items()},
    "deep": "[" * 8000,
    "digits": "1" * 8000,
    "nothing": "{}",
    "a list": "[]",
}


@pytest.mark.parametrize("payload", REFUSED.values(), ids=REFUSED.keys())
def test_a_claim_that_does_not_end_in_time_or_is_no_claim_is_refused(payload: str) -> None:
    ours, _ = holder(until=time.time() + 60)
    with pytest.raises(UnauthenticatedError):
        holder(Role.BUFFER)[0].check(claimed(ours, payload.encode()), CONTRACT)


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
