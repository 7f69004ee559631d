"""The client's bookkeeping: items that wait for a result, on behalf of one `score` call.

Invariant: every entry of a ticket is resolved exactly once, at the ticket's deadline at the latest; later results
are dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from protos import reward_pb2
from reward_service.outcomes import error_result


class Ticket:
    """One `score` call: its items, its results so far, its deadline (monotonic seconds)."""

    def __init__(self, items: Sequence[reward_pb2.ScoreItem], deadline: float) -> None:
        self.deadline = deadline
        self.entries = [Entry(self, item) for item in items]
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open = len(self.entries)
        if not self._open:
            self.finished.set_result(None)

    def results(self) -> list[reward_pb2.ScoreResult]:
        """One per item, in order; to be read once all are resolved."""
        return [entry.result for entry in self.entries if entry.result is not None]

    def resolved(self) -> None:
        """Counts one entry down."""
        self._open -= 1
        if not self._open and not self.finished.done():
            self.finished.set_result(None)

    def expire(self, code: str, reason: str) -> None:
        """Resolves what is open with an error."""
        for entry in self.entries:
            if entry.result is None:
                entry.resolve(entry.overdue(code, reason))


class Entry:
    """One item that waits.

    Attributes:
        attempts: calls that answered for this item, or timed out, so far.
        failed_at: address at which the last try failed; avoided if there is another.
        last_error: the last try's error.
    """

    __slots__ = ("attempts", "failed_at", "item", "last_error", "result", "ticket")

    def __init__(self, ticket: Ticket, item: reward_pb2.ScoreItem) -> None:
        self.ticket = ticket
        self.item = item
        self.attempts = 0
        self.failed_at = ""
        self.last_error: reward_pb2.Error | None = None
        self.result: reward_pb2.ScoreResult | None = None

    def resolve(self, result: reward_pb2.ScoreResult) -> None:
        """Sets the result; a second one is dropped."""
        if self.result is None:
            self.result = result
            self.ticket.resolved()

    def note(self, code: str, message: str, *, retryable: bool, address: str) -> None:
        """Remembers a failed try."""
        self.last_error = reward_pb2.Error(code=code, message=message, retryable=retryable)
        self.failed_at = address

    def fail(self) -> None:
        """Resolves with the last try's error."""
        self.resolve(reward_pb2.ScoreResult(item_id=self.item.item_id, error=self.last_error))

    def overdue(self, code: str, reason: str) -> reward_pb2.ScoreResult:
        """The result of an item whose deadline has passed; the last try's error says more than that alone."""
        last = f"; last error {self.last_error.code}: {self.last_error.message}" if self.last_error else ""
        code = self.last_error.code if self.last_error else code
        return error_result(self.item.item_id, code, f"{reason}{last}", retryable=True)
