"""A grant is replaced under its holder, who is warned before it ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rollmesh.mesh.access.credentials import Credentials
from rollmesh.mesh.access.role_grants import MeshKey
from rollmesh.mesh.access.roles import Identity, Role
from rollmesh.mesh.access.secret import parse_secret
from rollmesh.mesh.access.token_file import CHECK_INTERVAL_S, GRANT_GAUGE, Expiry, credentials_of
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import ConfigError, UnauthenticatedError
from tests.secrets_here import TOKEN, write_secret

CONTRACT = "rollmesh.v1.Buffer"
ME = Identity(Role.GENERATOR, "generator-node1.a")
LIFE_S = 1000.0


class Holder:
    """A process with a grant that ends, and with a clock of its own."""

    def __init__(self, folder: Path) -> None:
        self.now = self.began = float(round(time.time()))
        self.path = folder / "token"
        self.write()
        security = SecuritySection(token_file=self.path)
        credentials = credentials_of(security, ME, lambda: self.now)
        assert credentials is not None
        self.credentials: Credentials = credentials
        self.expiry = Expiry(credentials, lambda: self.now)

    def write(self, role: Role = Role.GENERATOR, name: str = "node1", token: str = TOKEN) -> None:
        """Replaces the file, as `mv` does."""
        until = self.now + LIFE_S
        self.put(MeshKey(token).grant_file(role, name, until))

    def put(self, text: str) -> None:
        write_secret(self.path.with_suffix(".new"), text).rename(self.path)

    def checked(self) -> Identity:
        """The identity that its claims prove to a front of the mesh at the same time."""
        mesh = MeshKey(TOKEN)
        front = Credentials(mesh.public, *mesh.grant(Role.BUFFER), "", lambda: self.now)
        return front.check(self.credentials.claim(CONTRACT), CONTRACT)

    def grant_in_use(self) -> str:
        return ".".join(self.credentials.claim(CONTRACT).split(".")[1:3])


@pytest.fixture
def holder(tmp_path: Path) -> Holder:
    return Holder(tmp_path)


def test_a_file_that_is_replaced_is_used_within_seconds(holder: Holder) -> None:
    first = holder.grant_in_use()
    holder.write()
    assert holder.grant_in_use() == first
    holder.now += CHECK_INTERVAL_S
    second = holder.grant_in_use()
    assert second != first
    assert holder.checked() == ME
    holder.now += CHECK_INTERVAL_S
    assert holder.grant_in_use() == second


@pytest.mark.parametrize(
    ("replace", "said"),
    [
        (lambda holder: holder.write(token="a token of another mesh altogether"), "another mesh"),
        (lambda holder: holder.write(role=Role.LEARNER), "a grant for learner"),
        (lambda holder: holder.write(name="node2"), "members generator-node2"),
        (lambda holder: holder.put("rollmesh-grant-1.half"), "cut short"),
        (lambda holder: holder.path.chmod(0o644), "chmod 600"),
        (lambda holder: (holder.write(), holder.path.chmod(0o644)), "chmod 600"),
        (lambda holder: holder.path.unlink(), "No such file"),
    ],
    ids=["mesh", "role", "name", "damaged", "opened", "open", "gone"],
)
def test_what_cannot_replace_it_leaves_it_in_use(
    holder: Holder, replace: Callable[[Holder], object], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = holder.grant_in_use()
    replace(holder)
    for _ in range(3):
        holder.now += CHECK_INTERVAL_S
        assert holder.grant_in_use() == first
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert [said in line for line in told] == [True]
    holder.write()
    holder.now += CHECK_INTERVAL_S
    assert holder.grant_in_use() != first


def test_a_file_that_is_closed_as_the_error_says_is_used(holder: Holder) -> None:
    first = holder.grant_in_use()
    holder.write()
    holder.path.chmod(0o644)
    holder.now += CHECK_INTERVAL_S
    assert holder.grant_in_use() == first
    holder.path.chmod(0o600)
    holder.now += CHECK_INTERVAL_S
    assert holder.grant_in_use() != first


@pytest.mark.parametrize("role", [Role.GENERATOR, Role.LEARNER], ids=["used", "refused"])
def test_all_credentials_of_a_process_say_once_what_they_found(
    holder: Holder, role: Role, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    others = [credentials_of(SecuritySection(token_file=holder.path), ME, lambda: holder.now) for _ in range(2)]
    for _ in range(2):
        holder.write(role)
        holder.now += CHECK_INTERVAL_S
        for credentials in (holder.credentials, *others):
            assert credentials is not None
            credentials.claim(CONTRACT)
    assert [str(holder.path) in record.getMessage() for record in caplog.records] == [True, True]


def test_the_token_itself_may_take_its_place(holder: Holder) -> None:
    holder.put(TOKEN)
    holder.now += LIFE_S
    assert holder.checked() == ME
    assert not holder.expiry.gauges()


def test_at_its_end_the_error_names_the_file_and_a_new_one_helps(holder: Holder) -> None:
    holder.grant_in_use()
    holder.now += LIFE_S
    for call in (holder.grant_in_use, holder.expiry.gauges):
        with pytest.raises(UnauthenticatedError, match=str(holder.path)) as caught:
            call()
        assert "rollmesh token grant generator" in caught.value.hint
        assert caught.value.exit_code == 2
    with pytest.raises(ConfigError, match="ended"):
        credentials_of(SecuritySection(token_file=holder.path), ME, lambda: holder.now)
    holder.write()
    holder.grant_in_use()
    assert holder.expiry.gauges() == {GRANT_GAUGE: pytest.approx(LIFE_S)}


def test_a_warning_comes_once_in_the_last_tenth(holder: Holder, caplog: pytest.LogCaptureFixture) -> None:
    def warnings() -> int:
        assert GRANT_GAUGE in holder.expiry.gauges()
        return sum("put a new one" in record.getMessage() for record in caplog.records)

    holder.now += 0.89 * LIFE_S
    assert warnings() == 0
    holder.now += 0.02 * LIFE_S
    assert warnings() == warnings() == 1
    holder.write()
    holder.now += CHECK_INTERVAL_S
    assert warnings() == 1


def test_a_token_has_no_end_and_is_read_once(tmp_path: Path) -> None:
    security = SecuritySection(token_file=write_secret(tmp_path / "token"))
    credentials = credentials_of(security, ME)
    assert credentials is not None
    assert not Expiry(credentials).gauges()
    assert not Expiry(None).gauges()
    write_secret(tmp_path / "token", "a token of another mesh altogether")
    front = parse_secret(TOKEN, "").credentials(Identity(Role.BUFFER))
    assert front.check(credentials.claim(CONTRACT), CONTRACT) == ME
