"""Deadlines of the reference model where walks come upon them by chance alone: at the bound itself."""

from __future__ import annotations

from rollmesh.buffer.policy.rules import TableRules
from rollmesh.buffer.policy.version_ranges import VersionRanges
from rollmesh.buffer.reference_model.drafts import Draft, grant_drafts
from rollmesh.buffer.reference_model.group_states import Group, GroupState, Task
from rollmesh.buffer.reference_model.table_machine import TableMachine
from rollmesh.mesh.trajectory.versions import PolicyVersion

STALENESS = 1


def test_a_group_is_as_old_as_its_grant_until_all_its_members_are_stored() -> None:
    """A member that is not stored yet may still have tokens of the version that was served at the grant."""
    machine = TableMachine("train", TableRules(groups_per_step=1, max_staleness=STALENESS))
    machine.take_over(0)
    machine.seed(1, [Task(1, 2)], call=1)
    (group,) = machine.admit("m1", PolicyVersion(1, 0), 1, 1, 0)
    newer = VersionRanges.of([PolicyVersion(1, 3)])
    for member, deadline in ((0, 0 + STALENESS), (1, 3 + STALENESS)):
        machine.write(group.group_id, group.lease, group.attempt, member, scored=True, size=1, ranges=newer)
        assert group.deadline == deadline
    assert group.state is GroupState.READY


def test_a_draft_is_handed_out_as_long_as_its_group_can_just_be_trained() -> None:
    group = Group("g", Task(1, 2), 1, PolicyVersion(1, 5))
    drafts = {member: Draft(1, 9, VersionRanges.of([PolicyVersion(1, 4 - member)])) for member in (0, 1)}

    def deadline_of(group: Group) -> int:
        return int(str(group.ranges).split(":")[1]) + STALENESS

    assert grant_drafts(group, drafts, deadline_of, u=5) == [0]
    assert (group.deadline, list(drafts)) == (5, [0])
