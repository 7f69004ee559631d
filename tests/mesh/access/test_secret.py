"""The contents of a token file, and the roles that it serves."""

from __future__ import annotations

import time

import pytest

from rollmesh.mesh.access.credentials import SKEW_S
from rollmesh.mesh.access.role_grants import MeshKey
from rollmesh.mesh.access.roles import Identity, Role
from rollmesh.mesh.access.secret import parse_secret
from rollmesh.mesh.errors import ConfigError
from tests.secrets_here import TOKEN

CONTRACT = "rollmesh.v1.Buffer"


def test_a_grant_serves_its_role_and_name_alone() -> None:
    text = MeshKey(TOKEN).grant_file(Role.GENERATOR, "node1")
    secret = parse_secret(text, "gen.token")
    identity = secret.new_identity(Role.GENERATOR)
    assert identity.member_id.startswith("generator-node1.")
    claim = secret.credentials(identity).claim(CONTRACT)
    assert parse_secret(TOKEN, "").credentials(Identity(Role.BUFFER)).check(claim, CONTRACT) == identity
    assert TOKEN not in text
    for wrong in ("generator-node2.x", "generator-x", "learner-node1.x", "node1.x"):
        with pytest.raises(ConfigError, match=r"gen\.token: a grant for members generator-node1\.\*"):
            secret.credentials(Identity(Role.GENERATOR, wrong))
    with pytest.raises(ConfigError, match="a grant for generator, and this is learner"):
        secret.credentials(Identity(Role.LEARNER, "learner-node1.x"))
    # Nor does who holds the token give one role an id of another.
    with pytest.raises(ConfigError, match=r"members generator-\*"):
        parse_secret(TOKEN, "").credentials(Identity(Role.GENERATOR, "learner-x"))
    # A service that holds a grant alone checks its callers all the same.
    learner = parse_secret(TOKEN, "").credentials(Identity(Role.LEARNER)).claim(CONTRACT)
    assert secret.credentials(identity).check(learner, CONTRACT).role is Role.LEARNER


GRANT_FILE = MeshKey(TOKEN).grant_file(Role.REWARD)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("short", "at least 32"),
        ("", "at least 32"),
        (GRANT_FILE.replace("grant-1.", "grant-1.A", 1), "damaged"),
        (f"{GRANT_FILE}.more", "damaged"),
        (f"{GRANT_FILE}A", "damaged"),
    ],
    ids=["short", "empty", "changed", "more", "longer"],
)
def test_what_is_neither_token_nor_grant_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_secret(text, "file")


def test_a_grant_that_is_cut_short_says_so_wherever_it_ends() -> None:
    for length in range(1, len(GRANT_FILE)):
        with pytest.raises(
            ConfigError, match=f"file: a damaged grant: it is cut short, to {length} characters"
        ) as caught:
            parse_secret(GRANT_FILE[:length], "file")
        assert "rollmesh token grant ROLE" in caught.value.hint


def test_a_grant_that_is_over_does_not_start_a_service() -> None:
    secret = parse_secret(MeshKey(TOKEN).grant_file(Role.REWARD, until=time.time() - 2 * SKEW_S), "file")
    with pytest.raises(ConfigError, match="ended"):
        secret.credentials(Identity(Role.REWARD))
