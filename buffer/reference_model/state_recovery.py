"""Recovery from the learner's log of used groups, after Redis lost acknowledged state.

The log knows every use on the surviving lineage; what Redis has restored is an earlier state of the same history. So a
group of the log is in one of three cases. Its end is known: then its use lies below the commit mark, and is passed
over. It is live: then the use is added to those it has. Its admission is lost: then it is counted as admitted and
consumed. Its prompt is removed from the pending ones, or will be ignored when it is seeded again.

A group without its payload cannot be offered again when its use is undone.

Uses come in the order of their versions. So each lost takeover is repeated before the first use at or above the
version from which it resumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollmesh.buffer.reference_model.group_states import Fate, Group, GroupState, Task
from rollmesh.buffer.reference_model.table_machine import TableMachine
from rollmesh.buffer.reference_model.table_state import Fenced, Suspect
from rollmesh.mesh.trajectory.versions import PolicyVersion


@dataclass(frozen=True, slots=True)
class RecordedUse:
    """A use on the surviving lineage.

    Attributes:
        group_id: the group.
        version: at which it trained.
        ordinal: of its prompt task.
    """

    group_id: str
    version: int
    ordinal: int


@dataclass(slots=True)
class RecoveryReport:
    """A portion of a learner's report.

    Attributes:
        incarnation: of the learner.
        version: in force.
        takeovers: the version from which each known incarnation resumed.
        uses: in the order of their versions.
    """

    incarnation: int
    version: int
    takeovers: Mapping[int, int]
    uses: Sequence[RecordedUse]

    def is_believed(self, machine: TableMachine) -> bool:
        """True if the report continues the state that the buffer knows."""
        known = dict(machine.lineage.resumed)
        agrees = all(known.get(incarnation, k) == k for incarnation, k in self.takeovers.items())
        return agrees and self.incarnation >= machine.lineage.incarnation

    def apply(self, machine: TableMachine) -> tuple[int, int]:
        """Adds the uses; returns the groups corrected, and those that were unknown."""
        corrected = unknown = 0
        for use in self.uses:
            self.catch_up(machine, use.version)
            if use.version < machine.committed:
                continue
            machine.u = max(machine.u, use.version + 1)
            group = machine.groups.get(use.group_id)
            if group is None:
                unknown += 1
                group = _recreate(machine, use, self.incarnation)
            elif use.version in group.uses:
                continue
            else:
                corrected += 1
            machine.add_recorded_use(group, use.version)
        return corrected, unknown

    def catch_up(self, machine: TableMachine, version: int | None) -> None:
        """Repeats lost takeovers, as far as they lie before a use at `version` (all of them, without one)."""
        while machine.lineage.incarnation < self.incarnation:
            missing = range(machine.lineage.incarnation + 1, self.incarnation + 1)
            points = [self.takeovers[i] for i in missing if i in self.takeovers]
            if version is not None and version < min(points):
                return
            machine.take_over(points[0])


def reassert(
    machine: TableMachine, report: RecoveryReport, now: int, *, more: bool, doubt: int
) -> tuple[int, int, int]:
    """Applies the learner's report of its uses: (groups corrected, groups that were unknown, the doubt in force).

    Args:
        machine: the table.
        report: what it says.
        now: ms.
        more: this is not the last portion.
        doubt: that this is about; 0 asks which there is.

    Raises:
        Fenced: another learner has taken the run over.
        Suspect: this is about another doubt.
    """
    if not report.is_believed(machine):
        raise Fenced
    if report.incarnation > machine.lineage.incarnation and not machine.doubt:
        machine.mark_suspect(now)
    if not doubt:
        return 0, 0, machine.doubt
    if doubt != machine.doubt:
        raise Suspect
    found = report.apply(machine)
    if not more:
        report.catch_up(machine, None)
        machine.clear_suspect(now, report.version)
    return *found, doubt


def _pending(machine: TableMachine, ordinal: int) -> list[Task]:
    return [task for task in machine.pending if task.ordinal == ordinal]


def _release_prompt(machine: TableMachine, ordinal: int) -> None:
    """Brings a prompt back to where the lost admission took it from.

    The group whose eviction queued it again may still be alive here, or the failed group that was driven again may be
    unaware of that.
    """
    if ordinal > machine.seeded:
        return
    for group in list(machine.groups.values()):
        if group.task.ordinal == ordinal and group.state is not GroupState.CONSUMED:
            if not group.uses:
                machine._finish(group, Fate.EVICTED_STALE, "lost_state", requeue=True)
            return
    for group_id, note in reversed(machine.dead_letters.notes.items()):
        if note.kept and note.task.ordinal == ordinal:
            machine.redrive([group_id])
            return


def _recreate(machine: TableMachine, use: RecordedUse, incarnation: int) -> Group:
    if not _pending(machine, use.ordinal):
        _release_prompt(machine, use.ordinal)
    if entries := _pending(machine, use.ordinal):
        task = min(entries, key=lambda entry: entry.parent)
        machine.pending.remove(task)
    else:
        task = Task(use.ordinal, 0)
        machine.counts["seeded_tasks"] += 1
        if use.ordinal > machine.seeded:
            machine.used_ahead.add(use.ordinal)
    machine.counts["admitted"] += 1
    number = int(use.group_id.rpartition("-")[2])
    machine.skip_ids(to=number)
    group = Group(use.group_id, task, number, PolicyVersion(incarnation, 0), order=number, state=GroupState.CONSUMED)
    group.done = [False] * task.n
    group.payload_lost = True
    machine.groups[use.group_id] = group
    return group
