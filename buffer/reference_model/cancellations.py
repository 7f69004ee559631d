"""Notices to generators that a group need not be worked on any more.

If a group ends while it is being generated, or another attempt takes it over, its former generator is notified. That is
the holder of its lease, or the one that lost the lease and may still work (a broken stream, a stopped process). A
generator that gave the group up needs no notice. A notice waits until its member has acknowledged it, or has left.
"""

from __future__ import annotations

from collections.abc import Iterable

from rollmesh.buffer.protocol.leases import Lease
from rollmesh.buffer.reference_model.group_states import Group


class Cancellations:
    """Notices by member: the leases of groups that are not needed any more."""

    def __init__(self) -> None:
        self.waiting: dict[str, set[Lease]] = {}
        self._gone: set[str] = set()

    def add(self, group: Group) -> bool:
        """Adds a notice for the group's generator; False if it has none."""
        worker = group.holder or group.previous_holder
        if not worker or worker in self._gone:
            return False
        self.waiting.setdefault(worker, set()).add(Lease(group.group_id, group.lease))
        return True

    def read(self, member: str, told: Iterable[Lease] = ()) -> set[Lease]:
        """Notices that the member has not acknowledged yet; those in `told` are forgotten."""
        waiting = self.waiting.get(member, set())
        waiting -= set(told)
        return set(waiting)

    def leave(self, member: str) -> None:
        """Drops the notices of a member that has left."""
        self._gone.add(member)
        self.waiting.pop(member, None)

    def join(self, member: str) -> None:
        """Begins the notices of a member that has joined (again)."""
        self._gone.discard(member)
