"""The offers that a learner makes, and where their sockets listen."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch
from pydantic import ValidationError

from rollmesh.learner.weights import PublishRules, WeightPublisher
from rollmesh.learner.weights.published_version import PublishedVersion
from rollmesh.learner.weights.transports import Broadcast, Rendezvous, SenderTransport, configured_transports
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.network import NetworkSection, SecuritySection
from rollmesh.mesh.config.run import RunSection
from rollmesh.mesh.config.weights import WeightsSection
from rollmesh.mesh.errors import ConfigError, WeightsError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.weights.rendezvous import connect_store
from rollmesh.protos import weights_pb2


def config(**weights: object) -> Config:
    return Config.model_validate(
        {"model": {"path": "m"}, "data": {"train": "t"}, "algorithm": "grpo", "weights": weights}
    )


@pytest.mark.parametrize(
    ("transport", "expected"),
    [("auto", []), ("shm", []), ("grpc", []), ("gloo", ["gloo"]), ("disk", ["disk"])],
)
def test_what_costs_something_is_offered_when_asked_for(tmp_path: Path, transport: str, expected: list[str]) -> None:
    offers = configured_transports(config(transport=transport, dir=str(tmp_path)))
    assert [offer.name for offer in offers] == expected
    for offer in offers:
        offer.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of machines without CUDA")
def test_nccl_needs_a_device() -> None:
    with pytest.raises(ConfigError, match=r"weights\.transport is nccl, but torch finds no CUDA device here"):
        configured_transports(config(transport="nccl"))


def test_disk_needs_a_folder() -> None:
    with pytest.raises(ValidationError, match="transport disk needs dir"):
        WeightsSection(transport="disk")


def test_deltas_need_grpc() -> None:
    with pytest.raises(ValidationError, match="encoding delta travels over grpc"):
        WeightsSection(transport="shm", encoding="delta")


@pytest.mark.parametrize("name", [".", "..", "../elsewhere"])
def test_no_run_lies_outside_its_folder(name: str) -> None:
    with pytest.raises(ValidationError, match="name"):
        RunSection(name=name)


def test_a_rendezvous_listens_where_it_is_told() -> None:
    rendezvous = Rendezvous(NetworkSection(), SecuritySection())
    member = connect_store(rendezvous.address, 60)
    assert member.port == rendezvous.store.port
    listening = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert [address.ip for address in listening if address.port == member.port] == ["127.0.0.1"]


def test_a_rendezvous_that_others_could_reach_is_refused() -> None:
    with pytest.raises(ConfigError, match="has neither token nor TLS"):
        Rendezvous(NetworkSection(host="0.0.0.0"), SecuritySection())
    network = NetworkSection(host="0.0.0.0", advertise="10.0.0.7:4000")
    allowed = Rendezvous(network, SecuritySection(allow_insecure=True))
    host, _, port = allowed.address.rpartition(":")
    assert host == "10.0.0.7"
    assert int(port) not in (0, 4000)


def test_closing_ends_a_broadcast_that_waits_for_its_members() -> None:
    broadcast = Broadcast("gloo", Rendezvous(NetworkSection(), SecuritySection()), timeout_s=60, window_s=60)
    publisher = WeightPublisher("run", {}, PublishRules(transport="gloo"), offers=[broadcast])
    publisher.publish(PolicyVersion(1, 0), [("w", torch.zeros(3))], "float32")
    waiting = broadcast.join("member", PolicyVersion(1, 0), "")
    publisher.close()
    with pytest.raises(WeightsError, match="the learner ends"):
        waiting.result(60)
    assert not broadcast._thread.is_alive()
    with pytest.raises(WeightsError, match="not broadcast any more"):
        broadcast.join("member", PolicyVersion(1, 0), "")


def test_who_joins_a_version_that_goes_before_its_round_is_told() -> None:
    broadcast = Broadcast("gloo", Rendezvous(NetworkSection(), SecuritySection()), timeout_s=60, window_s=0)
    publisher = WeightPublisher("run", {}, PublishRules(transport="gloo", keep_versions=1), offers=[broadcast])
    publisher.publish(PolicyVersion(1, 0), [("w", torch.zeros(3))], "float32")
    # Rounds begin with this lock alone.
    with broadcast._changed:
        waiting = broadcast.join("member", PolicyVersion(1, 0), "")
        publisher.publish(PolicyVersion(1, 1), [("w", torch.ones(3))], "float32")
    with pytest.raises(WeightsError, match="version 1:0 is not broadcast any more"):
        waiting.result(180)
    publisher.close()


class Noted(SenderTransport):
    """Offers nothing but a name, and notes what it is asked."""

    name = "noted"

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def offer(self, version: PublishedVersion) -> weights_pb2.Offer | None:
        self.calls.append(("offer", version.policy.version))
        return weights_pb2.Offer(transport="noted") if version.policy.version else None

    def retire(self, version: PublishedVersion) -> None:
        self.calls.append(("retire", version.policy.version))

    def close(self) -> None:
        self.calls.append(("close", -1))


def test_a_publisher_offers_and_retires_every_version_once() -> None:
    noted = Noted()
    publisher = WeightPublisher("run", {}, PublishRules(transport="grpc", keep_versions=1), offers=[noted])
    manifests = [publisher.publish(PolicyVersion(1, v), [("w", torch.zeros(3))], "float32") for v in range(2)]
    publisher.close()
    assert [[offer.transport for offer in manifest.offers] for manifest in manifests] == [[], ["noted"]]
    assert noted.calls == [("offer", 0), ("offer", 1), ("retire", 0), ("retire", 1), ("close", -1)]
