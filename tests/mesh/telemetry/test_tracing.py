"""Traces of a service, as a collector gets them over gRPC."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.config.telemetry import TelemetrySection
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.telemetry.otlp import ENDPOINT
from rollmesh.mesh.telemetry.span import Event
from rollmesh.mesh.telemetry.trace_ids import ROOT
from rollmesh.mesh.telemetry.tracing import Tracer, no_traces, open_tracer
from rollmesh.mesh.trajectory.versions import PolicyVersion
from tests.collector import collecting
from tests.secrets_here import write_secret

KEY = "the key of the collector"
SECOND = 1_000_000_000


def tracer_to(url: str | None, *, sample: float = 1.0, key: Path | None = None, instance: str = "here") -> Tracer:
    security = SecuritySection(telemetry_key_file=key)
    return open_tracer(
        TelemetrySection(otlp=url, sample=sample), security, run="run", service="buffer", instance=instance
    )


def record_one(tracer: Tracer) -> None:
    trace = tracer.trajectory("g", 0)
    assert trace is not None
    trace.record("admit", 1, 2)


def test_two_services_make_one_trace(tmp_path: Path) -> None:
    with collecting(KEY) as (collector, url):
        generator, learner = (
            tracer_to(url, key=write_secret(tmp_path / name, KEY), instance=name) for name in ("generator", "learner")
        )
        step = learner.version(PolicyVersion(1, 4))
        ours, theirs = generator.trajectory("g-1-2", 3), learner.trajectory("g-1-2", 3)
        assert ours is not None
        assert theirs is not None
        assert step is not None
        swap = Event("weights", 15, {"version": "1:3", "tokens": 7})
        ours.record("generate", 10, 20, {"attempt": 2, "versions": ["1:3"], "whole": True}, number=2, events=[swap])
        ours.record("reward", 20, 30, number=2, failure="reward_timeout: none in 5 s")
        ours.record("score", 22, 28, number=2, inside=("reward", 2))
        theirs.record("train", 40, 35, {"train_version": 3}, number=1, link=step.root)
        theirs.record(ROOT, 10, 50, {"reward": 0.5})
        generator.close()
        learner.close()
    (trace,) = collector.by_trace().values()
    by_name = {span.name: span for span in trace}
    root = by_name[ROOT]
    assert root.parent_id == ""
    assert by_name["generate"].parent_id == by_name["train"].parent_id == root.span_id
    assert by_name["score"].parent_id == by_name["reward"].span_id
    assert by_name["generate"].attributes["attempt"] == 2
    assert by_name["generate"].events == (("weights", 15),)
    assert by_name["reward"].failure == "reward_timeout: none in 5 s"
    assert (by_name["train"].began_ns, by_name["train"].ended_ns) == (40, 40), "clocks of two hosts differ"
    assert by_name["train"].links == (f"{step.root[0]:032x}",)
    assert root.attributes == {"reward": 0.5}


def test_without_a_collector_nothing_is_made() -> None:
    for tracer in (no_traces(), tracer_to(None)):
        assert not tracer.is_on
        assert tracer.trajectory("g", 0) is None
        assert tracer.version(PolicyVersion(1, 1)) is None
        tracer.close()


def test_a_share_of_trajectories_is_traced_and_every_version() -> None:
    with collecting() as (collector, url):
        tracer = tracer_to(url, sample=0.2)
        kept = [tracer.trajectory(f"g-{number}", 0) is not None for number in range(500)]
        trace = tracer.version(PolicyVersion(1, 1))
        assert trace is not None
        trace.record("step", 1, 2)
        tracer.close()
    assert 50 < sum(kept) < 150
    assert len(collector.spans) == 1


def test_a_host_may_have_a_collector_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting() as (collector, url):
        monkeypatch.setenv(ENDPOINT, url)
        tracer = tracer_to("http://127.0.0.1:9")
        record_one(tracer)
        tracer.close()
    assert [span.name for span in collector.spans] == ["admit"]


def test_a_key_that_is_wrong_is_said_and_not_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with collecting(KEY) as (collector, url):
        tracer = tracer_to(url, key=write_secret(tmp_path / "key", "another key"))
        record_one(tracer)
        assert collector.calls.acquire(timeout=60)
        tracer.close()
    assert not collector.spans
    assert "UNAUTHENTICATED" in caplog.text
    assert "another key" not in caplog.text


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    key = write_secret(tmp_path / "key", KEY)
    key.chmod(0o644)
    with pytest.raises(ConfigError, match=r"security\.telemetry_key_file"):
        tracer_to("http://127.0.0.1:9", key=key)


def test_an_end_does_not_wait_for_a_collector_that_is_frozen() -> None:
    with collecting() as (collector, url):
        collector.held.clear()
        tracer = tracer_to(url)
        record_one(tracer)
        assert collector.calls.acquire(timeout=60)
        tracer.close(0.1)
        assert tracer.counts.dropped._value.get() == 1


@pytest.mark.parametrize("url", ["localhost:4317", "http://", "http://here/v1/traces", "ftp://here:1", "http://h:x"])
def test_what_is_no_collector_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="OTLP over gRPC"):
        TelemetrySection(otlp=url)
