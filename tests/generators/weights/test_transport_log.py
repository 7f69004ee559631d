"""The choice of a transport: what is asked for, what there is, and what is said of it."""

from __future__ import annotations

import logging

import pytest

from rollmesh.generators.weights.transport_log import TransportLog
from rollmesh.generators.weights.transports import choose, transports
from rollmesh.mesh.config.weights import TransportName
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.runtime.hosts import host_id
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.weights import BucketSet
from rollmesh.mesh.weights.shared_files import FILE_PREFIX, SHARED_MEMORY
from rollmesh.protos import weights_pb2

ALL = transports(host_id())


def bucket_set(*offers: str) -> BucketSet:
    address = str(SHARED_MEMORY / f"{FILE_PREFIX}run")
    made = [weights_pb2.Offer(transport=name, address=address, host_id=host_id()) for name in offers]
    return BucketSet(PolicyVersion(1, 0), None, [], made)


@pytest.mark.parametrize(
    ("setting", "offered", "expected"),
    [
        ("auto", ["shm"], ["shm", "grpc"]),
        ("auto", [], ["grpc"]),
        ("grpc", ["shm"], ["grpc"]),
        ("shm", ["shm"], ["shm"]),
        # A broadcast that cannot be joined, and files that cannot be seen, leave grpc.
        ("gloo", ["gloo"], ["gloo", "grpc"]),
        ("gloo", [], ["grpc"]),
        ("disk", ["disk"], ["grpc"]),
        ("nccl", ["shm"], ["grpc"]),
    ],
)
def test_what_is_tried_in_which_order(setting: TransportName, offered: list[str], expected: list[str]) -> None:
    assert [transport.name for transport in choose(ALL, setting, bucket_set(*offered))] == expected


def test_shared_memory_that_is_asked_for_is_not_replaced() -> None:
    with pytest.raises(WeightsError, match=r"weights\.transport is shm, but the learner offers no shared memory"):
        choose(ALL, "shm", bucket_set())


def test_the_choice_is_said_with_its_reasons_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    chosen = TransportLog()
    for _ in range(3):
        chosen.record("grpc", bucket_set(), ALL, "auto", {})
    assert chosen.text.startswith("grpc (not shm: the learner offers no shared memory")
    assert caplog.text.count("weights come over") == 1
    chosen.record("shm", bucket_set("shm"), ALL, "shm", {})
    assert chosen.text == "shm"
    chosen.record("grpc", bucket_set("gloo"), ALL, "gloo", {"gloo": "it has begun"})
    assert chosen.text == "grpc (not gloo: it has begun)"
    assert caplog.text.count("weights come over") == 3
