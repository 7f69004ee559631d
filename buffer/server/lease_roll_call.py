"""Asks the holder at the other end of a stream for its leases, and notices when it stops answering.

Invariants
  * A front asks for an inventory at least every third of a lease term.
  * A holder may have the leases that it names, and those sent on this stream that it had not received by then. Any
    other lease is lost.
  * A holder that owes a receipt or an answer for too long loses its stream.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from rollmesh.buffer.protocol.leases import Lease, leases_of
from rollmesh.mesh.errors import UnreachableError
from rollmesh.protos import buffer_pb2 as pb

_QUESTIONS_PER_TERM = 3
# While a receipt has been due for longer than this, no further lease is sent.
_PROMPT_S = 0.5


class RollCall:
    """The roll call of one stream.

    Args:
        term_s: lease term, in seconds; an answer may be owed for this long.
        patience_s: a receipt may be owed for this long.
        clock: monotonic seconds.
    """

    def __init__(self, term_s: float, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._term_s = term_s
        self._patience_s = patience_s
        self.interval_s = term_s / _QUESTIONS_PER_TERM
        """Seconds between two inquiries."""
        self._clock = clock
        self._in_transit: deque[Lease] = deque()
        self._received = 0
        self._silent_since = 0.0
        self._next_question = clock()
        self._owed_since: float | None = None
        self._has_answered = False
        self._named: set[Lease] | None = None
        self._confirmed: frozenset[Lease] = frozenset()

    def record_sent(self, lease: Lease) -> None:
        """Records a lease that goes out on the stream."""
        if not self._in_transit:
            self._silent_since = self._clock()
        self._in_transit.append(lease)
        if self._named is not None:
            self._named.add(lease)

    def record_request(self, request: pb.AdmitRequest | pb.SampleRequest) -> None:
        """Records a request: the number of leases received on this stream, and the inventory if the holder sent one."""
        news = min(request.received - self._received, len(self._in_transit))
        if news > 0:
            for _ in range(news):
                self._in_transit.popleft()
            self._received += news
            self._silent_since = self._clock()
        if request.HasField("inventory"):
            self._confirmed = frozenset(leases_of(request.inventory.leases))
            self._named = {*self._confirmed, *self._in_transit}
            # Before the first question there was none to answer: a holder that hears nothing says as much.
            self._has_answered = self._has_answered or self._owed_since is not None
            self._owed_since = None

    @property
    def in_transit(self) -> int:
        """Leases sent and not known to be received."""
        return len(self._in_transit)

    def unacknowledged(self) -> list[Lease]:
        """Leases that the holder has acknowledged neither by its count nor by name."""
        return [lease for lease in self._in_transit if lease not in self._confirmed]

    @property
    def is_responsive(self) -> bool:
        """True if the holder has answered on this stream, and owes no receipt for long: only then may it get more."""
        return self._has_answered and self._silent_s <= _PROMPT_S

    @property
    def _silent_s(self) -> float:
        """Seconds for which a receipt has been due; 0 if none is."""
        return self._clock() - self._silent_since if self._in_transit else 0.0

    def check_alive(self) -> None:
        """Checks that the holder answers.

        Raises:
            UnreachableError: the holder hangs, or nothing reaches it although its connection stands.
        """
        hint = "its groups go to others; it opens its stream again when it can"
        if self._silent_s > self._patience_s:
            raise UnreachableError(
                f"the holder has not received for {self._patience_s:.1f} s what it was sent", hint=hint
            )
        if self._owed_since is not None and self._clock() - self._owed_since > self._term_s:
            raise UnreachableError(f"the holder has not said for {self._term_s:.1f} s what it holds", hint=hint)

    @property
    def due_s(self) -> float:
        """Seconds until the next inquiry is due."""
        return max(0.0, self._next_question - self._clock())

    def inquire_if_due(self) -> int:
        """Milliseconds within which an inventory is wanted, if it is time to ask for one; else 0."""
        now = self._clock()
        if now < self._next_question:
            return 0
        self._next_question = now + self.interval_s
        self._owed_since = now if self._owed_since is None else self._owed_since
        return max(1, round(self._term_s * 1000))

    def pop_inventory(self) -> set[Lease] | None:
        """Leases that the holder may have, if it has sent an inventory since the last call; else None.

        The same inventory counts again: Redis may have gone back.
        """
        named, self._named = self._named, None
        return named
