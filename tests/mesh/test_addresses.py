"""Addresses with and without ports, of both families."""

import ipaddress
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.mesh.addresses import addresses_of, host_of, is_unspecified, join_address, split_address
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.rpc.failover_channel import is_local
from rollmesh.mesh.runtime.service import advertised_address
from rollmesh.reward_service.routing import target_of

HOSTS = st.one_of(st.ip_addresses().map(str), st.from_regex(r"[a-z][a-z0-9-]{0,20}(\.[a-z]{2,6})?", fullmatch=True))


@given(HOSTS, st.integers(1, 65535))
def test_what_is_put_together_comes_apart_again(host: str, port: int) -> None:
    address = join_address(host, port)
    assert split_address(address) == (host, port)
    assert split_address(f"grpc://{address}") == (host, port)
    assert host_of(address) == host_of(host) == host
    assert join_address(*split_address(address)) == address


@pytest.mark.parametrize(
    "wrong", ["", ":7400", "node1", "node1:", "node1:seventy", "node1:0", "node1:65536", "2001:db8::5:7400", "a/b:1"]
)
def test_other_forms_are_refused_with_an_example(wrong: str) -> None:
    with pytest.raises(ConfigError, match="address") as caught:
        split_address(wrong)
    assert "[2001:db8::5]:7400" in caught.value.hint


def test_an_ipv6_literal_without_brackets_is_named_as_such() -> None:
    with pytest.raises(ConfigError, match="needs brackets"):
        split_address("2001:db8::5:7400")


def test_fronts_of_both_families_in_one_list() -> None:
    assert addresses_of("[::1]:7400, grpc://node1:7400,[::1]:7400") == ["[::1]:7400", "node1:7400"]
    assert is_local("[::1]:7400,127.0.0.1:7400")
    assert not is_local("[2001:db8::5]:7400")
    assert target_of("grpc://[2001:db8::5]:7400") == "[2001:db8::5]:7400"


@pytest.mark.parametrize(
    ("host", "advertise", "expected"),
    [
        ("127.0.0.1", None, "127.0.0.1:5"),
        ("::1", None, "[::1]:5"),
        ("[::1]", None, "[::1]:5"),
        ("0.0.0.0", "node7", "node7:5"),
        ("0.0.0.0", "node7:80", "node7:80"),
        ("::", "2001:db8::7", "[2001:db8::7]:5"),
        ("::", "[2001:db8::7]", "[2001:db8::7]:5"),
        ("::", "[2001:db8::7]:80", "[2001:db8::7]:80"),
        ("0.0.0.0", None, f"{socket.gethostname()}:5"),
    ],
)
def test_advertised_address(host: str, advertise: str | None, expected: str) -> None:
    assert advertised_address(host, 5, advertise) == expected


def test_a_service_on_all_addresses_is_never_advertised_at_loopback() -> None:
    """The mesh is on this machine, so the route to it is of no use to others."""
    assert advertised_address("::", 5, None, mesh="127.0.0.1:7400") == f"{socket.gethostname()}:5"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]"])
def test_all_addresses(host: str) -> None:
    assert is_unspecified(host)
    assert not is_unspecified(str(ipaddress.ip_address(1)))
    assert not is_unspecified("node1")
