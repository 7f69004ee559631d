"""Notices to generators that a group need not be worked on any more.

A group that ends while it is being generated, or that another attempt takes over, is told to its former worker: the
holder of its lease, or the one who lost the lease and may still be at it (a broken stream, a stopped process). Who gave
the group up by itself knows. A notice waits for its member until that has said that it was told; it goes with the
member.
"""

from __future__ import annotations

from collections.abc import Iterable

from rollmesh.buffer.protocol.leases import Lease
from rollmesh.buffer.reference_model.group_states import Group


class Cancellations:
    """Notices by member: the leases that nobody needs."""

    def __init__(self) -> None:
        self.waiting: dict[str, set[Lease]] = {}
        self._gone: set[str] = set()

    def note(self, group: Group) -> bool:
        """Tells the group's worker; False where there is none."""
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
        """The member is gone."""
        self._gone.add(member)
        self.waiting.pop(member, None)

    def join(self, member: str) -> None:
        """The member is there (again)."""
        self._gone.discard(member)
