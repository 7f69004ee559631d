"""Parts of the trials of deployments that need no cluster: names for pods, and the verdict of a ledger."""

from __future__ import annotations

import socket
import struct

import pytest

from deploy.kubernetes.trial_names import Endpoints, answer
from deploy.trials import balance


class Known(Endpoints):
    """Services that are there, without an API."""

    def __init__(self, **services: list[str]) -> None:
        self._services = {f"{name}.rollmesh.svc.cluster.local": found for name, found in services.items()}

    def of(self, name: str) -> list[str] | None:
        return self._services.get(name)


def ask(name: str, kind: int = 1) -> bytes:
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return struct.pack(">HHHHHH", 77, 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">HH", kind, 1)


@pytest.mark.parametrize(
    ("name", "kind", "code", "addresses"),
    [
        ("buffer.rollmesh.svc.cluster.local", 1, 0, ["10.0.0.1", "10.0.0.2"]),
        ("redis.rollmesh.svc.cluster.local", 1, 0, []),
        ("buffer.rollmesh.svc.cluster.local", 28, 0, []),
        ("example.org", 1, 3, []),
    ],
)
def test_pods_find_services_by_name(name: str, kind: int, code: int, addresses: list[str]) -> None:
    query = ask(name, kind)
    said = answer(query, Known(buffer=["10.0.0.1", "10.0.0.2"], redis=[]))
    number, flags, questions, answers, *_ = struct.unpack(">HHHHHH", said[:12])
    assert (number, flags & 0xF, questions, answers) == (77, code, 1, len(addresses))
    assert said[12 : len(query)] == query[12:]
    records = said[len(query) :]
    found = [socket.inet_ntoa(records[at + 12 : at + 16]) for at in range(0, len(records), 16)]
    assert found == addresses


def test_a_ledger_in_one_line_for_each_table() -> None:
    counts = "  admitted  {}\n  trained  {}\n  readmissions  0\n  trained/committed  7\n  balances\n"
    ledger = f"table train\n{counts.format(9, 7)}table eval\n{counts.format(1, 1)}"
    assert balance(ledger).splitlines() == [
        "ledger of train: 9 admitted, 7 trained, 0 readmissions, balances",
        "ledger of eval: 1 admitted, 1 trained, 0 readmissions, balances",
    ]
