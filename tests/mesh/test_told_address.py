"""Addresses that only a member's own host can call are not told to others."""

from __future__ import annotations

import pytest

from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.told_address import told_address
from rollmesh.protos import membership_pb2 as pb

LOOPBACK = "127.0.0.1:40603"


def told(address: str, peer: str, role: pb.Role = pb.ROLE_GENERATOR) -> str:
    request = pb.JoinRequest(member_id="member-1", role=role, address=address)
    return told_address(request, peer, lambda: {"10.0.0.5", "fd14::5"})


@pytest.mark.parametrize(
    "peer", ["ipv4:127.0.0.1:9", "ipv6:%5B::1%5D:9", "ipv6:%5B::ffff:10.0.0.5%5D:9", "ipv4:10.0.0.5:9", "unix:"]
)
def test_who_is_on_the_host_of_the_front_is_called_over_loopback(peer: str) -> None:
    assert told(LOOPBACK, peer) == LOOPBACK
    assert told("localhost:7", peer, pb.ROLE_LEARNER) == "localhost:7"


@pytest.mark.parametrize("peer", ["ipv4:10.0.0.7:9", "ipv6:%5Bfd14::7%5D:9", "ipv6:%5Bfe80::1%25eth0%5D:9"])
def test_another_host_is_not_called_over_loopback(peer: str, caplog: pytest.LogCaptureFixture) -> None:
    for address in (LOOPBACK, "[::1]:40603"):
        assert told(address, peer) == ""
        assert "only its own host can call" in caplog.text
        assert "--host" in caplog.text
    for role in (pb.ROLE_LEARNER, pb.ROLE_REWARD, pb.ROLE_MODEL):
        with pytest.raises(ConfigError, match="only its own host can call") as error:
            told(LOOPBACK, peer, role)
        assert "--host" in error.value.hint
    for address in ("10.0.0.7:40603", "node7:1", ""):
        assert told(address, peer, pb.ROLE_LEARNER) == address


def test_interfaces_of_this_host_are_known() -> None:
    request = pb.JoinRequest(member_id="member-1", role=pb.ROLE_LEARNER, address=LOOPBACK)
    with pytest.raises(ConfigError):
        told_address(request, "ipv4:192.0.2.1:9")
