"""State of a client's calls: items that wait for a result, on behalf of one `score` call.

Invariant: every entry of a ticket is resolved exactly once; later results are dropped. Time counts against an entry
only while no endpoint answers anything, or since the entry has failed itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from rollmesh.protos import reward_pb2
from rollmesh.reward_service.client.outgoing import ItemDetails, Wants, outgoing, size_bound
from rollmesh.reward_service.outcomes import error_result


class Ticket:
    """A `score` call: its items with their details, if any, its results so far, its beginning (monotonic seconds)."""

    def __init__(
        self,
        items: Sequence[reward_pb2.ScoreItem],
        began: float,
        details: Sequence[ItemDetails] | None = None,
    ) -> None:
        self._began = began
        self.entries = [
            Entry(self, item, details[place] if details is not None else None) for place, item in enumerate(items)
        ]
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open = len(self.entries)
        if not self._open:
            self.finished.set_result(None)

    def results(self) -> list[reward_pb2.ScoreResult]:
        """The results, one per item, in order; to be read once all are resolved."""
        return [entry.result for entry in self.entries if entry.result is not None]

    def count_resolved(self) -> None:
        """Counts one entry down."""
        self._open -= 1
        if not self._open and not self.finished.done():
            self.finished.set_result(None)

    def abandon(self) -> None:
        """Resolves the open entries, which are not sent any more: the caller is gone."""
        for entry in self.entries:
            if entry.result is None:
                entry.resolve(entry.timeout_result("closed", "the caller is gone"))

    def expire(self, now: float, timeout_s: float, heard_at: float, why: Callable[[], tuple[str, str]]) -> float:
        """Resolves overdue entries with an error; returns the time of the next check.

        Args:
            timeout_s: their time.
            heard_at: time of the last answer of any endpoint.
            why: code and words for those that never failed.
        """
        silent_since = max(self._began, heard_at)
        due = silent_since + timeout_s
        for entry in self.entries:
            if entry.result is not None:
                continue
            since = silent_since if entry.first_failed_at is None else min(silent_since, entry.first_failed_at)
            if since + timeout_s <= now:
                code, words = why()
                entry.resolve(entry.timeout_result(code, f"no score within {timeout_s:g} s: {words}"))
            else:
                due = min(due, since + timeout_s)
        return due


class Entry:
    """A waiting item.

    Attributes:
        attempts: calls that answered for this item, or timed out, so far.
        failed_at: address at which the last try failed; avoided if there is another.
        first_failed_at: when it first failed, since it last waited for its turn.
        last_error: the last try's error.
        retry_after_s: seconds that the server of the last try asked to wait.
        unit: equal for items of one call of `score` and one group.
    """

    __slots__ = (
        "_details",
        "_sent",
        "attempts",
        "failed_at",
        "first_failed_at",
        "item",
        "last_error",
        "result",
        "retry_after_s",
        "ticket",
        "unit",
    )

    def __init__(self, ticket: Ticket, item: reward_pb2.ScoreItem, details: ItemDetails | None = None) -> None:
        self.ticket = ticket
        self.item = item
        self.unit = (id(ticket), item.group_id)
        self.retry_after_s = 0.0
        self._details = details
        self._sent: tuple[Wants, reward_pb2.ScoreItem] | None = None
        self.attempts = 0
        self.failed_at = ""
        self.first_failed_at: float | None = None
        self.last_error: reward_pb2.Error | None = None
        self.result: reward_pb2.ScoreResult | None = None

    def size(self, wants: Wants) -> int:
        """Bytes that it takes at most."""
        return size_bound(self.item, self._details, wants)

    def outgoing(self, wants: Wants) -> reward_pb2.ScoreItem:
        """The item as a server wants it, made once for all that want the same; any thread may call this."""
        if self._sent is None or self._sent[0] != wants:
            self._sent = (wants, outgoing(self.item, self._details, wants))
        return self._sent[1]

    def resolve(self, result: reward_pb2.ScoreResult) -> None:
        """Sets the result; a second one is dropped."""
        if self.result is None:
            self.result = result
            self.ticket.count_resolved()

    def record_failure(self, code: str, message: str, *, retryable: bool, address: str, now: float) -> None:
        """Stores the error of a failed try."""
        self.first_failed_at = now if self.first_failed_at is None else self.first_failed_at
        self.last_error = reward_pb2.Error(code=code, message=message, retryable=retryable)
        self.retry_after_s = 0.0
        self.failed_at = address

    def fail(self) -> None:
        """Resolves with the last try's error."""
        self.resolve(reward_pb2.ScoreResult(item_id=self.item.item_id, error=self.last_error))

    def timeout_result(self, code: str, reason: str) -> reward_pb2.ScoreResult:
        """The result of an item after its deadline; the last try's error explains more than that alone."""
        last = f"; last error {self.last_error.code}: {self.last_error.message}" if self.last_error else ""
        code = self.last_error.code if self.last_error else code
        return error_result(self.item.item_id, code, f"{reason}{last}", retryable=True)
