"""A run that stands still, as a reader sees it: in the view, and afterwards in the report."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rollmesh.dashboard.report import write_report
from rollmesh.launcher import folder
from rollmesh.launcher.console.plain import PlainView
from rollmesh.launcher.mesh_client import Snapshot
from rollmesh.learner.recovery.run_identity import CONFIG
from rollmesh.mesh.config import load_config
from rollmesh.mesh.lease_holders import describe_holders
from rollmesh.protos import buffer_pb2, membership_pb2
from rollmesh.report.stalls import Stall, read_stalls
from rollmesh.report.summary import FinalState, write_summary
from tests.report_page import read_panels
from tests.rollmesh.test_report import run_folder  # noqa: F401  a fixture

HOLDER = buffer_pb2.Holder(
    member_id="generator-1",
    role="generator",
    address="10.0.0.3:7001",
    groups=3,
    oldest_group_id="train-17",
    held_ms=75_300,
    heartbeat_age_ms=400,
    stream_open=True,
)


def _snapshot(stalled_s: float, learner: bool = True) -> Snapshot:
    members = [membership_pb2.Member(role=membership_pb2.ROLE_LEARNER, gauges={"stalled_seconds": stalled_s})]
    return Snapshot(
        table=buffer_pb2.DescribeResponse(generators=1, generators_serving=1),
        members=members if learner else [],
        holders=buffer_pb2.HoldersResponse(holders=[HOLDER], total=1),
    )


def test_who_holds_what_is_said_with_what_no_one_holds() -> None:
    table = buffer_pb2.DescribeResponse(generators=2, generators_loading=1, unheld=1, generators_wait="gate: closed")
    lost = buffer_pb2.Holder(member_id="g2", role="generator", groups=1, oldest_group_id="train-3", held_ms=2_000)
    said = describe_holders(table, buffer_pb2.HoldersResponse(holders=[HOLDER, lost], total=5))
    assert said.split("; ") == [
        "generator generator-1 at 10.0.0.3:7001 holds 3 groups (train-17 for 75 s), last heartbeat 0.4 s ago",
        "generator g2 holds 1 group (train-3 for 2.0 s) and is not in the mesh any more",
        "3 more hold groups",
        "1 group of lost generators wait for another generator",
        "none of 2 generators has weights in service, 1 still load the model",
        "generators wait: gate: closed",
    ]


@pytest.mark.parametrize(
    ("pending", "said"),
    [
        (0, "no prompt is waiting; no generator is in the mesh"),
        (5, "no group is in progress, 5 prompts are waiting; no"),
    ],
)
def test_where_no_one_holds_anything_it_says_what_is_missing(pending: int, said: str) -> None:
    table = buffer_pb2.DescribeResponse(counts=buffer_pb2.LedgerCounts(pending=pending))
    assert describe_holders(table, buffer_pb2.HoldersResponse()).startswith(said)


def test_the_learner_is_named_once_where_it_waits() -> None:
    snapshot = _snapshot(0)
    assert snapshot.table is not None
    snapshot.table.learner_waits = "waits for groups: 2 begun"
    assert snapshot.who_waits() == "learner: waits for groups: 2 begun"


def test_a_learner_that_does_other_things_waits_for_no_groups() -> None:
    snapshot = _snapshot(0)
    assert snapshot.table is not None
    snapshot.table.learner_waits = "waits for groups: 2 begun"
    (learner,) = snapshot.learners()
    learner.gauges["phase/checkpointing"], learner.gauges["phase/waiting_for_groups"] = 1.0, 0.0
    assert snapshot.who_waits() == "learner: checkpointing"
    learner.waiting_reason = "checkpointing for 12 s"
    assert snapshot.who_waits() == "learner: checkpointing for 12 s"


def test_plain_lines_tell_a_stall_when_it_begins_at_doubling_intervals_and_at_its_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    view = PlainView(every_steps=1)
    for seconds in (0, 61, 62, 121, 123, 200, 0, 0, 61):
        view.update(_snapshot(seconds), [])
    view.update(Snapshot(trouble="no answer"), [])
    view.close()
    lines = [line.partition(" ")[2] for line in capsys.readouterr().out.splitlines()]
    held = "generator generator-1 at 10.0.0.3:7001 holds 3 groups (train-17 for 75 s), last heartbeat 0.4 s ago"
    assert lines == [
        f"stalled for 61 s: {held}",
        f"stalled for 123 s: {held}",
        "groups move again, after 200 s",
        f"stalled for 61 s: {held}",
    ]


def test_a_mesh_without_a_learner_says_so() -> None:
    assert _snapshot(0, learner=False).who_waits() == "there is no learner"
    starting = _snapshot(0, learner=False)
    starting.follow(Snapshot(learner_starts=True), [])
    assert starting.who_waits() == "the learner is starting"
    joined, gone = _snapshot(0), _snapshot(0, learner=False)
    joined.follow(starting, [])
    gone.follow(joined, [])
    assert gone.who_waits() == "there is no learner"
    finished = _snapshot(0, learner=False)
    finished.run_finished = True
    assert finished.who_waits() == _snapshot(0).who_waits() == "nothing waits"


def test_a_learner_starts_until_it_has_taken_the_run_over(tmp_path: Path) -> None:
    identity = tmp_path / CONFIG
    identity.write_text("the run's, of an earlier launch")
    os.utime(identity, ns=(1, 1))
    assert not folder.learner_starts(tmp_path), "nothing was launched"
    folder.write_mesh(tmp_path, "127.0.0.1:9")
    assert not folder.learner_starts(tmp_path), "its launcher was killed"
    with folder.locked(tmp_path):
        assert folder.learner_starts(tmp_path)
        later = (tmp_path / folder.MESH).stat().st_mtime_ns + 1
        os.utime(identity, ns=(later, later))
        assert not folder.learner_starts(tmp_path)


def test_the_report_has_every_stall_with_its_end(run_folder: Path) -> None:  # noqa: F811
    told = [
        ("begins", 1060.0, 60.0, "generator-1 holds 3 groups"),
        ("lasts", 1120.0, 120.0, "generator-1 holds 2 groups"),
        ("over", 1130.0, 130.0, "groups move again"),
        ("begins", 2060.0, 60.0, "no generator is in the mesh"),
    ]
    records = [{"event": event, "time": time, "seconds": seconds, "text": text} for event, time, seconds, text in told]
    (run_folder / "stalls.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    first, second = read_stalls(run_folder)
    assert first == Stall(
        1000.0, 130.0, "generator-1 holds 3 groups", "generator-1 holds 2 groups", "groups move again"
    )
    assert (second.began, second.ended) == (2000.0, "not known: the learner ended, or it still lasts")
    summary = write_summary(run_folder, load_config(run_folder / "config.yaml"), FinalState())
    assert [stall["seconds"] for stall in summary.stalls] == [130.0, 60.0]
    assert "2 stalls of 190 s in all: see the report" in list(summary.lines())
    cells = ["130 s", "generator-1 holds 3 groups", "generator-1 holds 2 groups", "groups move again"]
    assert read_panels(write_report(run_folder))["stalls"]["rows"][0] == ["1970-01-01 00:16:40", *cells]
