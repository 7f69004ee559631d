"""Times that say nothing of a placement: restarts, absences of services, and holds of `rollmesh yield`. Pure.

The launcher looks at the mesh several times a second. Neither times of batches nor the deadline of a trial have what
overlaps with such a time. An evaluation lets no deadline pass either; from the times of batches it is subtracted where
they are measured.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from rollmesh.launcher.mesh_client import Snapshot
from rollmesh.protos import buffer_pb2


@dataclass(frozen=True, slots=True)
class MeshState:
    """The mesh as a look finds it.

    Attributes:
        disturbance: why it does not work as usual; empty where it does.
        evaluates: held-out prompts are being answered.
        data_left: batches that the data still give; None where that is not known.
    """

    disturbance: str = ""
    evaluates: bool = False
    data_left: int | None = None


class Watch:
    """Sums up the looks of one trial.

    Args:
        now: Unix time in seconds, as all times.

    Attributes:
        counted_s: seconds without evaluations and disturbances.
        state: as the last look has found it.
    """

    def __init__(self, now: float) -> None:
        self.counted_s = 0.0
        self.state = MeshState()
        self._last = now
        self._disturbed: list[tuple[float, float]] = []
        self._restarts: list[float] = []
        self._awaits_step = False

    def restarted(self, at: float) -> None:
        """Notes that a service was started again. No deadline passes until the next step."""
        self._restarts.append(at)
        self._awaits_step = True

    def stepped(self) -> None:
        """Notes that the learner has trained a batch."""
        self._awaits_step = False

    def look(self, now: float, state: MeshState) -> None:
        """Notes the time since the look before."""
        if state.disturbance:
            if self.state.disturbance:
                self._disturbed[-1] = (self._disturbed[-1][0], now)
            else:
                self._disturbed.append((self._last, now))
        elif not (state.evaluates or self.state.evaluates or self.state.disturbance or self._awaits_step):
            self.counted_s += max(0.0, now - self._last)
        self._last, self.state = now, state

    def is_disturbed(self, began: float, ended: float) -> bool:
        """True where a disturbance overlaps with a time."""
        absent = any(first <= ended and began <= last for first, last in self._disturbed)
        return absent or any(began <= at <= ended for at in self._restarts)


def disturbance(seen: Snapshot, pids: Mapping[str, int], generators: Collection[str]) -> str:
    """The reason why a mesh does not work as usual; empty where it does.

    Args:
        seen: the last snapshot.
        pids: of running services by name.
        generators: names of those that the launcher keeps running.
    """
    if seen.trouble:
        return seen.trouble
    if not seen.learners():
        return seen.absent_learner()
    present = {member.pid for member in seen.generators()}
    # A process that has just started is no member yet.
    if absent := [name for name in generators if pids.get(name) not in present]:
        return f"{', '.join(absent)} is absent"
    return "`rollmesh yield` lets no turn begin" if seen.turns is not None and seen.turns.held_ms else ""


def groups_in_progress(table: buffer_pb2.DescribeResponse) -> int:
    """Groups of a table that have no fate yet, and tasks that wait to become groups."""
    counts = table.counts
    return counts.pending + counts.generating + counts.ready + counts.leased


def batches_of_data(table: buffer_pb2.DescribeResponse | None) -> int | None:
    """Batches that the data still give; None while the learner still seeds prompts."""
    if table is None or not table.end_of_data:
        return None
    return groups_in_progress(table) // max(1, table.groups_per_step)
