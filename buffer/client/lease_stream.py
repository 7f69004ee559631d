"""Standing streams of leases: the client's side of "a lease lives only while its holder names it".

Invariants
  * A client names the leases that its owner holds, and those that came and were not consumed yet.
  * It names them with the first request of every connection and whenever the server asks. It also does so as soon as a
    lease is offered again that its owner has finished. So a lease that was lost on the way ends.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rollmesh.buffer.client.reconnecting_stream import ReconnectingStream
from rollmesh.buffer.protocol.leases import Lease
from rollmesh.protos import buffer_pb2 as pb

_REMEMBERED = 8192


class RecentLeases:
    """Remembers the latest leases, to recognize those delivered twice."""

    def __init__(self) -> None:
        self._leases: OrderedDict[Lease, None] = OrderedDict()

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases)

    def add(self, lease: Lease) -> bool:
        """Adds a lease; returns whether it is new."""
        if lease in self._leases:
            return False
        self._leases[lease] = None
        if len(self._leases) > _REMEMBERED:
            self._leases.popitem(last=False)
        return True

    def forget(self, lease: Lease) -> None:
        """Forgets a lease, so that its next delivery counts as new again."""
        self._leases.pop(lease, None)


class LeaseStream(ReconnectingStream):
    """A standing stream on which the client names its holdings.

    Attributes:
        holdings: the leases that the owner holds of those it took from the stream. Until the owner sets this, it holds
            all that came.
    """

    def __init__(self, what: str, retry_s: float) -> None:
        self._seen = RecentLeases()
        self._offered_again: set[Lease] = set()
        self._received_count = 0
        self.holdings: Callable[[], Iterable[Lease]] | None = None
        super().__init__(what, retry_s)
        # Every connection begins with a question, which says within what time the next one comes.
        self._patience_s = retry_s

    @abstractmethod
    def _accept(self, response: Any) -> None:
        """Handles one response."""

    @abstractmethod
    def _undelivered(self) -> Iterable[Lease]:
        """Leases that came and were not consumed yet."""

    @abstractmethod
    def _report(self, inventory: pb.Inventory | None) -> None:
        """Sends how many leases were received, and the inventory if there is one."""

    def _inventory(self) -> pb.Inventory:
        return pb.Inventory(leases=[lease.to_proto() for lease in self._all_holdings()])

    def _all_holdings(self) -> set[Lease]:
        return {*(self._seen if self.holdings is None else self.holdings()), *self._undelivered()}

    def _answer_inquiry(self, within_ms: int) -> None:
        """Answers the server's question for the holdings; it asks again within a lease term."""
        self._patience_s = within_ms / 1000
        self._report(self._inventory())

    def _is_new(self, lease: Lease) -> bool:
        """Counts a lease that came; False if it was offered before, as at the beginning of a connection."""
        self._received_count += 1
        is_new = self._seen.add(lease)
        if not is_new:
            self._offered_again.add(lease)
        return is_new

    def _on_response(self, response: Any) -> None:
        self._accept(response)
        again, self._offered_again = self._offered_again, set()
        if again and not again <= self._all_holdings():
            self._report(self._inventory())
