"""Direct hand-off: the write that seals a group leases it to the learner's stream that waits for it.

Both commands travel in one round trip, which is most of what a lone group would wait for. This serves the order `fifo`
alone: every other order must see what else is ready.

Invariants
  * At most one stream of a table waits here, and one write at a time leases to it: that write ends the offer.
  * Whatever a write has leased is delivered. If its answer is lost, the delivery has no groups. The stream then
    reopens, and is offered all groups leased to it.
  * A delivery names its stream: what was leased to an earlier stream was offered when the present one opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from rollmesh.buffer.store.records import Leased, Write
from rollmesh.buffer.store.table_snapshot import TableSnapshot


@dataclass(frozen=True, slots=True)
class WaitingStream:
    """A learner's stream of this front that waits while nothing is ready.

    Attributes:
        incarnation: of the learner.
        version: at which groups are to train.
        credits: groups that it takes at most.
        token: of the stream.
    """

    incarnation: int
    version: int
    credits: int
    token: str


class Delivery(NamedTuple):
    """Groups that a write has leased to a stream; `leased` is None if the answer that names them was lost."""

    stream: WaitingStream
    leased: list[Leased] | None


class _LastSealed(NamedTuple):
    """Groups that the last write has sealed, in this order; any later revision of the table makes it obsolete."""

    rev: int
    group_ids: tuple[str, ...]


class DirectHandoff:
    """Connects the writes of one front with its Sample streams.

    Args:
        notify: called with the table of each delivery.

    Attributes:
        waiting: by table, the stream that waits.
        writes_in_progress: of all tables.
    """

    def __init__(self, notify: Callable[[str], None]) -> None:
        self.waiting: dict[str, WaitingStream] = {}
        self.writes_in_progress = 0
        self._notify = notify
        self._leasing: set[str] = set()
        self._deliveries: dict[str, list[Delivery]] = {}
        self._last_sealed: dict[str, _LastSealed] = {}

    def offer(self, table: str, stream: WaitingStream) -> None:
        """Offers a stream: it takes the groups that the next write seals."""
        self.waiting[table] = stream

    def withdraw(self, table: str, token: str | None = None) -> None:
        """Ends the table's offer; with a token, only if it is that stream's."""
        stream = self.waiting.get(table)
        if stream is not None and token in (None, stream.token):
            del self.waiting[table]

    def is_pending(self, table: str) -> bool:
        """True if a write is leasing to a stream, or has leased groups that were not collected yet."""
        return table in self._leasing or table in self._deliveries

    def collect(self, table: str) -> list[Delivery]:
        """Deliveries since the last call, oldest first."""
        return self._deliveries.pop(table, [])

    def pop_last_sealed(self, table: str, snapshot: TableSnapshot) -> tuple[str, ...]:
        """Removes and returns the groups that the last write sealed, if exactly these are ready; else none."""
        sealed = self._last_sealed.pop(table, None)
        if sealed is None or sealed.rev != snapshot.rev or len(sealed.group_ids) != snapshot.ready:
            return ()
        return sealed.group_ids

    @contextmanager
    def write_in_progress(self, table: str, writes: Sequence[Write]) -> Iterator[WaitingStream | None]:
        """Counts a write while it lasts; yields the stream to which it must lease its groups, if there is one."""
        stream = self._pop_stream(table, writes)
        self.writes_in_progress += 1
        if stream is not None:
            self._leasing.add(table)
        try:
            yield stream
        except BaseException:
            if stream is not None:
                self.deliver(table, Delivery(stream, None))
            raise
        finally:
            self.writes_in_progress -= 1
            if stream is not None:
                self._leasing.discard(table)

    def _pop_stream(self, table: str, writes: Sequence[Write]) -> WaitingStream | None:
        """The waiting stream, if it can take all groups of these writes and no other write is in progress."""
        stream = self.waiting.get(table)
        if stream is None or self.writes_in_progress or len({w.group_id for w in writes}) > stream.credits:
            return None
        return self.waiting.pop(table)

    def record_sealed(self, table: str, rev: int, group_ids: Sequence[str]) -> None:
        """Records the groups, if any, that a write has sealed, and the revision at which it left the table."""
        self._last_sealed[table] = _LastSealed(rev, tuple(group_ids))

    def deliver(self, table: str, delivery: Delivery) -> None:
        """Queues a delivery and wakes the table's streams."""
        self._deliveries.setdefault(table, []).append(delivery)
        self._notify(table)
