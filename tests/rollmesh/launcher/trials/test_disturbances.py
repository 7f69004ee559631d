"""Disturbances of a measurement: services that are absent, a mesh that does not answer, and holds of an operator."""

from __future__ import annotations

import pytest

from rollmesh.launcher.mesh_client import Snapshot
from rollmesh.launcher.trials.disturbances import MeshState, Watch, batches_of_data, disturbance
from rollmesh.protos import buffer_pb2, learner_pb2, membership_pb2

LEARNER = membership_pb2.Member(member_id="learner", role=membership_pb2.ROLE_LEARNER, pid=1)
GENERATORS = [
    membership_pb2.Member(member_id=f"generator-{n}", role=membership_pb2.ROLE_GENERATOR, pid=10 + n) for n in (0, 1)
]
PIDS = {"learner": 9, "generator-0": 10, "generator-1": 11}
HELD = learner_pb2.PlacementStatus(phase="generating", held_ms=9000)


@pytest.mark.parametrize(
    ("seen", "pids", "found"),
    [
        (Snapshot(members=[LEARNER, *GENERATORS]), PIDS, ""),
        (Snapshot(members=[LEARNER, *GENERATORS]), {"generator-1": 11}, "generator-0 is absent"),
        (Snapshot(members=[LEARNER, *GENERATORS]), {**PIDS, "generator-1": 12}, "generator-1 is absent"),
        (Snapshot(members=GENERATORS), PIDS, "there is no learner"),
        (Snapshot(trouble="no answer"), PIDS, "no answer"),
        (Snapshot(members=[LEARNER, *GENERATORS], turns=HELD), PIDS, "`rollmesh yield` lets no turn begin"),
        (
            Snapshot(members=[LEARNER, *GENERATORS], turns=learner_pb2.PlacementStatus(reason="4 more groups")),
            PIDS,
            "",
        ),
    ],
)
def test_a_mesh_that_is_not_as_usual(seen: Snapshot, pids: dict[str, int], found: str) -> None:
    assert disturbance(seen, pids, ["generator-0", "generator-1"]) == found


def test_the_end_of_the_data_bounds_the_batches() -> None:
    counts = buffer_pb2.LedgerCounts(pending=5, generating=2, ready=1, leased=1, trained=90)
    table = buffer_pb2.DescribeResponse(counts=counts, groups_per_step=4)
    assert batches_of_data(table) is None
    table.end_of_data = True
    assert batches_of_data(table) == 2
    assert batches_of_data(None) is None


def test_a_deadline_passes_only_while_the_mesh_works_as_usual() -> None:
    watch = Watch(100.0)
    watch.look(101.0, MeshState())
    assert watch.counted_s == 1.0
    watch.look(102.0, MeshState("held"))
    watch.look(150.0, MeshState("held"))
    watch.look(151.0, MeshState())
    watch.look(152.0, MeshState())
    assert watch.counted_s == 2.0
    watch.look(153.0, MeshState(evaluates=True))
    watch.look(190.0, MeshState())
    assert watch.counted_s == 2.0
    watch.restarted(190.0)
    watch.look(220.0, MeshState())
    assert watch.counted_s == 2.0
    watch.stepped()
    watch.look(221.0, MeshState())
    assert watch.counted_s == 3.0
