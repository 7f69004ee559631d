"""Messages where no step comes, and where a `mesh.jsonl` cannot be written."""

from __future__ import annotations

import json
from pathlib import Path

from rollmesh.launcher.console.quiet_notice import NoStepNotice, no_step_text
from rollmesh.launcher.mesh_client import Snapshot
from rollmesh.launcher.mesh_log import MeshLog
from rollmesh.protos import buffer_pb2, membership_pb2
from rollmesh.run_files import SNAPSHOTS


def told(quiet: NoStepNotice, first: int, last: int) -> list[int]:
    return [second for second in range(first, last) if quiet.due(float(second))]


def test_a_time_without_a_step_is_told_at_doubling_intervals() -> None:
    quiet = NoStepNotice(0.0)
    assert told(quiet, 0, 200) == [20, 40, 80, 160]
    quiet.step(200.0)
    assert told(quiet, 200, 1000) == [600]


def test_a_run_of_long_steps_tells_nothing() -> None:
    quiet = NoStepNotice(0.0)
    quiet.step(100.0)
    assert told(quiet, 100, 290) == []
    quiet.step(290.0)
    assert told(quiet, 290, 480) == []


def test_one_slow_step_does_not_silence_the_notice() -> None:
    quiet = NoStepNotice(0.0)
    for second in (2.0, 4.0, 126.0):
        quiet.step(second)
    assert told(quiet, 126, 150) == [146], "122 s were those of a recovery"


def test_it_says_who_waits_and_what_has_failed() -> None:
    waits = "waits for groups: 4 begun; a generator says: waits for rewards: no reward service answers"
    counts = buffer_pb2.LedgerCounts(failed=3, reasons={"failed/too_few_scored": 3})
    table = buffer_pb2.DescribeResponse(learner_waits=waits, counts=counts)
    learner = membership_pb2.Member(role=membership_pb2.ROLE_LEARNER)
    failed = [buffer_pb2.FailedGroup(causes=["timeout", "timeout"]), buffer_pb2.FailedGroup(causes=["odd", ""])]
    assert no_step_text(21.4, Snapshot(table=table, members=[learner]), failed, {}) == (
        f"no step for 21 s: learner: {waits}; 3 training groups failed (too_few_scored 3); mostly: timeout"
    )


def test_failures_before_this_launch_explain_no_wait() -> None:
    failed = [buffer_pb2.FailedGroup(causes=["new"]), *[buffer_pb2.FailedGroup(causes=["old"])] * 5]
    before = {"failed/too_few_scored": 5, "failed/attempts": 1}
    counts = buffer_pb2.LedgerCounts(failed=6, reasons=before)
    snapshot = Snapshot(table=buffer_pb2.DescribeResponse(counts=counts, learner_waits="waits"), run_finished=True)
    assert no_step_text(20, snapshot, failed, before) == "no step for 20 s: learner: waits"
    counts.reasons["failed/too_few_scored"] += 1
    snapshot.table = buffer_pb2.DescribeResponse(counts=counts, learner_waits="waits")
    said = no_step_text(20, snapshot, failed, before)
    assert said.endswith("; 1 training group failed (too_few_scored 1); mostly: new")


def test_it_says_what_else_the_learner_does() -> None:
    learner = membership_pb2.Member(role=membership_pb2.ROLE_LEARNER, waiting_reason="training for 30 s")
    snapshot = Snapshot(table=buffer_pb2.DescribeResponse(), members=[learner])
    assert no_step_text(40, snapshot, (), {}) == "no step for 40 s: learner: training for 30 s"
    assert no_step_text(40, Snapshot(trouble="no answer"), (), {}) == "no step for 40 s: no answer"


def test_a_learner_that_has_just_come_up_is_named() -> None:
    learner = membership_pb2.Member(role=membership_pb2.ROLE_LEARNER, gauges={"phase/starting": 1, "phase/training": 0})
    snapshot = Snapshot(table=buffer_pb2.DescribeResponse(), members=[learner])
    assert no_step_text(61, snapshot, (), {}) == "no step for 61 s: the learner has just come up"
    learner = membership_pb2.Member(role=membership_pb2.ROLE_LEARNER, gauges={"phase/training": 1})
    snapshot = Snapshot(table=buffer_pb2.DescribeResponse(), members=[learner])
    assert no_step_text(61, snapshot, (), {}) == "no step for 61 s: learner: training"


def test_a_full_disk_is_told_once_and_tried_again(tmp_path: Path) -> None:
    said: list[str] = []
    log = MeshLog(tmp_path, said.append)
    path = tmp_path / SNAPSHOTS
    generator = membership_pb2.Member(
        member_id="one", role=membership_pb2.ROLE_GENERATOR, gauges={"tokens_generated": 7}
    )
    snapshot = Snapshot(table=buffer_pb2.DescribeResponse(), members=[generator])
    path.symlink_to("/dev/full")
    assert [log.add(snapshot, 1.0), log.add(snapshot, 2.0)] == [7, 7]
    path.unlink()
    log.add(snapshot, 3.0)
    log.add(snapshot, 4.0)
    assert [json.loads(line)["time"] for line in path.read_text().splitlines() if line] == [3.0, 4.0]
    assert said == [
        f"{SNAPSHOTS} is not written: No space left on device; every second it is tried again",
        f"{SNAPSHOTS} is written again",
    ]


def test_a_reward_service_that_loads_its_model_is_named() -> None:
    table = buffer_pb2.DescribeResponse(generators_wait="rewards")
    service = membership_pb2.Member(
        role=membership_pb2.ROLE_REWARD, waiting_reason="classifier: its model is being loaded"
    )
    text = no_step_text(40, Snapshot(table=table, members=[service]), (), {})
    assert text.startswith("no step for 40 s: generators wait: rewards; rewards: classifier: its model is being loaded")
