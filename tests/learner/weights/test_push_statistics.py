"""Statistics of receivers' reports: stages, acknowledgements, failures, and their metrics for Prometheus."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from rollmesh.learner.weights import WeightPublisher, WeightsService, push_statistics
from rollmesh.learner.weights.push_metrics import push_collector
from rollmesh.learner.weights.push_statistics import PushStatistics
from rollmesh.mesh.errors import PayloadError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import weights_pb2


def report(member: str, version: int, *, error: str = "", scale: int = 1) -> weights_pb2.SwapReport:
    return weights_pb2.SwapReport(
        member_id=member,
        policy=PolicyVersion(1, version).to_proto(),
        error=error,
        digest="" if error else f"digest-{version}",
        bytes=100,
        first_byte_us=0 if error else 10 * scale,
        last_byte_us=0 if error else 20 * scale,
        pause_us=0 if error else 3 * scale,
        total_us=0 if error else 40 * scale,
    )


def test_each_stage_of_each_receiver_is_kept() -> None:
    pushes = PushStatistics()
    pushes.record_watch("near")
    for version in range(1, 101):
        pushes.record_announcement(PolicyVersion(1, version), time.time_ns())
        pushes.add(report("near", version, scale=version))
    pushes.add(report("far", 100, scale=1000))
    summary = pushes.by_receiver()["near"]
    assert (summary.count, summary.errors, summary.bytes) == (100, 0, 10_000)
    assert [summary.p50[stage] for stage in ("first_byte", "last_byte", "pause", "total")] == [505, 1010, 151.5, 2020]
    assert summary.p99["total"] > 3900
    assert pushes.summary().count == 101
    assert pushes.summary().metrics("push/")["push/total_ms_p50"] == pushes.summary().p50["total"] / 1e3
    far, near = pushes.to_proto().receivers
    assert (far.member_id, near.member_id) == ("far", "near"), "those heard of last come first"
    assert (near.last.policy.version, near.last.digest) == (100, "digest-100")
    assert near.pause_us.p50 == 151.5


def test_an_acknowledgement_counts_only_where_it_was_waited_for() -> None:
    """A version announced before a receiver came says nothing of the way to it."""
    pushes = PushStatistics()
    hour = 3600 * 10**9
    pushes.record_announcement(PolicyVersion(1, 1), time.time_ns() - hour)
    pushes.record_watch("late")
    pushes.add(report("late", 1))
    assert pushes.to_proto().receivers[0].last_ack_us == 0
    pushes.record_announcement(PolicyVersion(1, 2), time.time_ns())
    pushes.add(report("late", 2))
    [late] = pushes.to_proto().receivers
    assert 0 < late.last_ack_us < 60 * 10**6
    assert late.ack_us.p50 == late.last_ack_us


def test_failures_are_kept_with_their_cause_and_what_served_before() -> None:
    pushes = PushStatistics()
    pushes.add(report("a", 1))
    pushes.add(report("b", 1))
    pushes.add(report("a", 2, error="bucket 0 is damaged"))
    entries = {entry.member_id: entry for entry in pushes.to_proto().receivers}
    assert (entries["a"].errors, entries["a"].last_error) == (1, "bucket 0 is damaged")
    assert entries["a"].last_error_policy.version == 2
    assert entries["a"].last.policy.version == 1
    assert entries["b"].last_error == ""
    assert not entries["b"].HasField("last_error_policy")
    assert pushes.summary().last_error == "bucket 0 is damaged"
    assert pushes.summary().errors == 1


def test_the_receivers_heard_of_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_statistics, "_RECEIVERS", 100)
    pushes = PushStatistics()
    for index in range(150):
        pushes.add(report(f"generator-{index}", 1))
        pushes.add(report("stays", index))
    remembered = [receiver.member_id for receiver in pushes.to_proto().receivers]
    assert len(remembered) == 100
    assert {"stays", "generator-149"} <= set(remembered)
    assert "generator-0" not in remembered
    assert pushes.summary().count == 300, "who is forgotten has been counted"


def test_the_latest_reports_count_and_the_sum_over_all_costs_the_same_with_many() -> None:
    pushes = PushStatistics()
    for version in range(1, 201):
        pushes.add(report("near", version, scale=version))
    assert pushes.by_receiver()["near"].p50["total"] == 40 * (73 + 200) / 2, "the last 128"
    assert pushes.summary().p50["total"] == 40 * 201 / 2
    for number in range(5000):
        pushes.add(report(f"generator-{number}", 1, scale=7))
    assert pushes.summary().p50["total"] == pushes.summary().p99["total"] == 280
    assert pushes.summary().count == 5200


def test_prometheus_sees_every_receiver() -> None:
    pushes, registry = PushStatistics(), CollectorRegistry()
    registry.register(push_collector(pushes))
    pushes.add(report("a", 1, scale=1000))
    pushes.add(report("a", 2, error="no"))
    labels = {"receiver": "a", "stage": "total", "quantile": "0.99"}
    assert registry.get_sample_value("rollmesh_learner_push_seconds", labels) == 0.04
    assert registry.get_sample_value("rollmesh_learner_push_failures_total", {"receiver": "a"}) == 1
    assert registry.get_sample_value("rollmesh_learner_pushes_total", {"receiver": "a"}) == 1
    assert registry.get_sample_value("rollmesh_learner_push_bytes_total", {"receiver": "a"}) == 200


def test_a_push_is_pending_while_its_receiver_watches_and_serves_another_version() -> None:
    pushes, registry = PushStatistics(), CollectorRegistry()
    registry.register(push_collector(pushes))

    def pending() -> float | None:
        return registry.get_sample_value("rollmesh_learner_pushes_pending")

    assert pending() == 0
    pushes.record_announcement(PolicyVersion(1, 1), time.time_ns())
    for name in ("a", "b"):
        pushes.record_watch(name)
    assert pending() == 2
    pushes.add(report("a", 1))
    pushes.add(report("b", 1, error="no"))
    assert pending() == 1
    pushes.record_watch("b")
    pushes.record_watch_end("b")
    assert pending() == 1, "another stream of it is open"
    pushes.record_watch_end("b")
    assert pending() == 0
    pushes.record_announcement(PolicyVersion(1, 2), time.time_ns())
    assert pending() == 1


async def test_a_report_that_cannot_be_summed_up_is_refused(tmp_path: Path) -> None:
    publisher = WeightPublisher("run", {}, directory=tmp_path)
    service = WeightsService(publisher)
    sound = weights_pb2.SwapReport(member_id="gen-1", bytes=1 << 50, total_us=1 << 50)
    for _ in range(3):
        await service.Report(sound, None)
    for field in ("bytes", "total_us", "pause_us", "kept_bytes"):
        with pytest.raises(PayloadError, match=field):
            await service.Report(weights_pb2.SwapReport(member_id="gen-1", **{field: (1 << 50) + 1}), None)  # type: ignore[arg-type]
    assert (await service.Pushes(weights_pb2.PushesRequest(), None)).receivers[0].bytes == 3 << 50
    publisher.close()


async def test_texts_that_would_be_kept_are_short(tmp_path: Path) -> None:
    """A grant is good for as many receivers as its holder makes up names."""
    publisher = WeightPublisher("run", {}, directory=tmp_path)
    service = WeightsService(publisher)
    texts = [f.name for f in weights_pb2.SwapReport.DESCRIPTOR.fields if f.type == f.TYPE_STRING]
    assert {"member_id", "error", "digest", "transport", "source", "choice"} <= set(texts)
    for field in texts:
        with pytest.raises(PayloadError, match=field):
            await service.Report(weights_pb2.SwapReport(**{"member_id": "gen-1", field: "x" * 1001}), None)  # type: ignore[arg-type]
    for name in ("", "a b", "learner"):
        with pytest.raises(PayloadError, match="member_id"):
            await service.Report(weights_pb2.SwapReport(member_id=name), None)
    # A field that this release does not know.
    unknown = weights_pb2.ModelFile(content=b"x" * 5000).SerializeToString().replace(b"\x12", b"\xfa\x3f", 1)
    sound = weights_pb2.SwapReport(member_id="gen-1", error="x" * 1000)
    await service.Report(weights_pb2.SwapReport.FromString(sound.SerializeToString() + unknown), None)
    [kept] = [receiver.failed for receiver in publisher.pushes._receivers.values()]
    assert kept == sound
    publisher.close()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("member_id", ""),
        ("member_id", "x" * 257),
        ("address", "x" * 257),
        ("failed", ["x"] * 65),
        ("failed", ["x" * 257]),
    ],
)
async def test_what_a_tree_would_keep_is_short(tmp_path: Path, field: str, value: object) -> None:
    publisher = WeightPublisher("run", {}, directory=tmp_path)
    with pytest.raises(PayloadError, match=field):
        await WeightsService(publisher).Route(weights_pb2.RouteRequest(**{"member_id": "gen-1", field: value}), None)  # type: ignore[arg-type]
    publisher.close()
