"""Sends items to a set of equal endpoints: coalesced, balanced, failed over, retried, within each caller's deadline.

Invariants
  * `score` returns one result per item and raises for no remote failure.
  * A request holds whole groups unless they exceed the endpoint's limit, and no item_id twice.
  * An item is tried again only for retryable errors, at most `attempts` times. A lost connection is no try: the item
    goes elsewhere while its time lasts.
  * An item waits for its turn for as long as endpoints work on others. Its time is that without an answer from any
    endpoint, since less was asked of one or since the item first failed.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import grpc

from rollmesh.mesh.runtime.background_tasks import BackgroundTasks, log_errors
from rollmesh.mesh.wait import NO_WAIT, Wait
from rollmesh.protos import membership_pb2, reward_pb2
from rollmesh.reward_service.client.endpoint import RewardEndpoint, close_all
from rollmesh.reward_service.client.tickets import Entry, Ticket
from rollmesh.reward_service.client.transports.interface import CallError, Connect
from rollmesh.reward_service.client.validation import match_answer
from rollmesh.reward_service.outcomes import error_result, is_not_begun

log = logging.getLogger(__name__)

_MAX_BYTES = 1 << 20
_RETRY_BASE_S = 0.05
_RETRY_LONGEST_S = 1.0
# The connection or the server failed, not the request.
_LOST = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})
# Another try at the same endpoint will fail likewise.
_HOPELESS = frozenset(
    {grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
)


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Bounds of the calls of a client.

    Attributes:
        timeout_s: deadline of one call.
        attempts: tries of an item with a retryable error.
        wait_s: default deadline of `score`, retries and failover included.
    """

    timeout_s: float = 10.0
    attempts: int = 3
    wait_s: float = 30.0


class Dispatcher:
    """Client of a set of equal endpoints.

    Args:
        endpoints: addresses; may be empty at first.
        connect: makes the transport to one.
        limits: of its calls.
    """

    def __init__(self, endpoints: Iterable[str], connect: Connect, limits: CallLimits) -> None:
        self._connect = connect
        self._limits = limits
        self._endpoints: dict[str, RewardEndpoint] = {}
        self._queue: deque[list[Entry]] = deque()
        # Items that wait for their next try, by the timer that queues them.
        self._pausing: dict[asyncio.TimerHandle, list[list[Entry]]] = {}
        self._tasks = BackgroundTasks(log_errors(log))
        self._wake: asyncio.TimerHandle | None = None
        self._pump_due = False
        self._closed = False
        self._open_tickets = 0
        # When an endpoint last answered, or was last asked for less.
        self._heard_at = -math.inf
        self.set_endpoints(endpoints)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Addresses in use."""
        return tuple(self._endpoints)

    def set_endpoints(self, addresses: Iterable[str]) -> None:
        """Changes the set; calls in flight at an endpoint that leaves end in peace."""
        wanted = dict.fromkeys(addresses)
        for address in wanted:
            if address not in self._endpoints:
                self._endpoints[address] = RewardEndpoint(address, self._connect)
        leaving = [address for address in self._endpoints if address not in wanted]
        for address in leaving:
            endpoint = self._endpoints.pop(address)
            if not endpoint.busy:
                self._tasks.spawn(endpoint.close(), f"closing the connection to {endpoint.address}")
        if self._queue:
            self._pump_soon()

    async def score(self, items: Sequence[reward_pb2.ScoreItem], *, timeout_s: float) -> list[reward_pb2.ScoreResult]:
        """Scores items: one result per item, in order.

        Args:
            timeout_s: seconds without an answer of any endpoint, or since its first failure, after which an item ends.
        """
        loop = asyncio.get_running_loop()
        ticket = Ticket(items, loop.time())
        if self._closed:
            _refuse_closed(ticket.entries)
        self._queue.extend(_by_group(ticket.entries))
        self._pump_soon()
        self._open_tickets += 1
        try:
            while not ticket.finished.done():
                due = ticket.expire(loop.time(), timeout_s, self._heard_at, self._why_overdue)
                await asyncio.wait((ticket.finished,), timeout=due - loop.time())
        finally:
            self._open_tickets -= 1
            ticket.abandon()
        return ticket.results()

    def present_wait(self) -> Wait:
        """The reason why items wait at present; empty while none does, or an endpoint answers."""
        if not self._open_tickets:
            return NO_WAIT
        if not self._endpoints:
            return Wait("no reward service is known")
        troubles = [f"{e.address}: {e.circuit.trouble}" for e in self._endpoints.values() if e.circuit.trouble]
        if len(troubles) < len(self._endpoints):
            return NO_WAIT
        return Wait(f"no reward service answers: {'; '.join(troubles)}", membership_pb2.WAIT_CAUSE_NO_REWARD_SERVICE)

    def _why_overdue(self) -> tuple[str, str]:
        """(code, words) of an overdue item."""
        if wait := self.present_wait():
            return "unreachable", wait.reason
        return "timeout", "the call is under way"

    async def close(self) -> None:
        """Ends calls in flight; waiting items are answered with an error."""
        self._closed = True
        if self._wake is not None:
            self._wake.cancel()
        await self._tasks.close()
        for timer in self._pausing:
            timer.cancel()
        for unit in (*self._queue, *chain.from_iterable(self._pausing.values())):
            _refuse_closed(unit)
        self._queue.clear()
        self._pausing.clear()
        await close_all(list(self._endpoints.values()))

    # ------------------------------------------------------------------------------------------ sending

    def _pump_soon(self) -> None:
        """Pumps once the callers that are ready now have put their items in."""
        if not self._pump_due and not self._closed:
            self._pump_due = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Starts as many calls as endpoints allow."""
        self._pump_due = False
        loop = asyncio.get_running_loop()
        while self._queue and not self._closed:
            now = loop.time()
            endpoint, at = self._choose_endpoint(self._queue[0], now)
            if endpoint is None or at > now:
                if endpoint is not None and at != float("inf"):
                    self._pump_at(at)
                return
            if not endpoint.described:
                endpoint.begin(0, now)
                self._tasks.spawn(self._describe(endpoint), f"describing {endpoint.address}")
                continue
            batch = self._next_batch(endpoint.max_items, endpoint.free_items)
            if batch:
                endpoint.begin(len(batch), now)
                self._tasks.spawn(self._send(endpoint, batch), f"a call to {endpoint.address}")

    def _pump_at(self, at: float) -> None:
        if self._wake is not None:
            self._wake.cancel()
        self._wake = asyncio.get_running_loop().call_at(at, self._pump_soon)

    def _choose_endpoint(self, unit: list[Entry], now: float) -> tuple[RewardEndpoint | None, float]:
        """The endpoint that is ready first, and when; see `_rank` for those ready at once."""
        if not self._endpoints:
            return None, float("inf")
        avoid = unit[0].failed_at
        ready = [(endpoint.ready_at(now), endpoint) for endpoint in self._endpoints.values()]
        at, endpoint = min(ready, key=lambda pair: (pair[0], _rank(pair[1], avoid)))
        return endpoint, at

    def _next_batch(self, limit: int, free_items: float) -> list[Entry]:
        """Open entries for one request, by whole groups where they fit; at most one group beyond `free_items`."""
        batch: list[Entry] = []
        ids: set[str] = set()
        size = 0
        while self._queue:
            unit = [entry for entry in self._queue.popleft() if entry.result is None]
            if batch and (len(batch) + len(unit) > limit or not ids.isdisjoint(e.item.item_id for e in unit)):
                self._queue.appendleft(unit)
                break
            left = limit - len(batch)
            if len(unit) > left:
                self._queue.appendleft(unit[left:])
                unit = unit[:left]
            batch.extend(unit)
            ids.update(entry.item.item_id for entry in unit)
            size += sum(entry.item.ByteSize() for entry in unit)
            if size >= _MAX_BYTES or len(batch) >= min(limit, free_items):
                break
        return batch

    async def _send(self, endpoint: RewardEndpoint, batch: list[Entry]) -> None:
        loop = asyncio.get_running_loop()
        try:
            response = await endpoint.score([entry.item for entry in batch], self._limits.timeout_s)
        except asyncio.CancelledError:
            _refuse_closed(batch)
            raise
        except CallError as error:
            self._on_failed_call(endpoint, batch, error)
        else:
            endpoint.circuit.record_success()
            self._heard_at = loop.time()
            self._on_answer(endpoint, batch, response)
        finally:
            self._on_call_ended(endpoint, len(batch))

    async def _describe(self, endpoint: RewardEndpoint) -> None:
        try:
            await endpoint.describe()
            endpoint.circuit.record_sign_of_life()
        except CallError as error:
            now = asyncio.get_running_loop().time()
            endpoint.circuit.record_failure(now, _in_words(error), fatal=True, pause_s=error.retry_after_s or 0.0)
        finally:
            self._on_call_ended(endpoint, 0)

    def _on_call_ended(self, endpoint: RewardEndpoint, items: int) -> None:
        endpoint.end(items)
        if endpoint.address not in self._endpoints and not endpoint.busy:
            self._tasks.spawn(endpoint.close(), f"closing the connection to {endpoint.address}")
        self._pump_soon()

    # ------------------------------------------------------------------------------------------ answers

    def _on_answer(self, endpoint: RewardEndpoint, batch: list[Entry], response: reward_pb2.ScoreResponse) -> None:
        matched = match_answer([entry.item for entry in batch], response)
        if matched.unknown_ids:
            log.warning(
                "%s answered for %d items that were not in the call, such as %r",
                endpoint.address,
                len(matched.unknown_ids),
                matched.unknown_ids[0],
            )
        again, waiting = [], []
        for entry, result in zip(batch, matched.results, strict=True):
            if is_not_begun(result):
                entry.first_failed_at = None
                waiting.append(entry)
                continue
            entry.attempts += 1
            if result.WhichOneof("outcome") != "error":
                entry.resolve(result)
                continue
            error = result.error
            message = f"{endpoint.address}: {error.message}"
            entry.record_failure(
                error.code, message, retryable=error.retryable, address=endpoint.address, now=self._heard_at
            )
            if error.retryable and entry.attempts < self._limits.attempts:
                again.append(entry)
            else:
                entry.fail()
        self._retry(again)
        if waiting:
            endpoint.narrow_window(len(waiting))
            self._requeue_first(waiting)
        else:
            endpoint.on_success(len(batch))

    def _on_failed_call(self, endpoint: RewardEndpoint, batch: list[Entry], error: CallError) -> None:
        now = asyncio.get_running_loop().time()
        status, trouble = error.status, _in_words(error)
        what = f"{endpoint.address}: {trouble}"
        lost = status in _LOST
        endpoint.described &= not lost
        fatal = lost or error.throttled or status in _HOPELESS
        endpoint.circuit.record_failure(now, trouble, fatal=fatal, pause_s=error.retry_after_s or 0.0)
        if error.throttled:
            self._heard_at = now
            self._requeue_first(batch)
            return
        if status is grpc.StatusCode.RESOURCE_EXHAUSTED and len(batch) > 1:
            endpoint.circuit.record_success()
            endpoint.reduce_limit(len(batch))
            self._retry(batch, at_once=True)
            return
        if status is grpc.StatusCode.DEADLINE_EXCEEDED and endpoint.outstanding > 1:
            # It may have more than it can do: that is no failure of these, and they get their time again with less.
            self._heard_at = now
            endpoint.on_timeout(len(batch))
            self._requeue_first(batch)
            return
        code, message = _describe_failure(status, what, self._limits.timeout_s)
        for entry in batch:
            entry.attempts += not lost
            entry.record_failure(code, message, retryable=status not in _HOPELESS, address=endpoint.address, now=now)
            if entry.attempts >= self._limits.attempts:
                entry.fail()
        self._retry([entry for entry in batch if entry.result is None], at_once=lost)

    def _requeue_first(self, entries: list[Entry]) -> None:
        """Queues entries before those that came later."""
        self._queue.extendleft(reversed(_by_group(entries)))
        self._pump_soon()

    def _retry(self, entries: list[Entry], *, at_once: bool = False) -> None:
        """Queues entries again: at once where another endpoint (or the circuit) decides, else after a pause."""
        if not entries:
            return
        units = _by_group(entries)
        if at_once:
            self._requeue(units)
            return
        pause = min(_RETRY_LONGEST_S, _RETRY_BASE_S * 2 ** max(0, max(e.attempts for e in entries) - 1))
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle = loop.call_later(pause, lambda: self._requeue(self._pausing.pop(timer)))
        self._pausing[timer] = units

    def _requeue(self, units: list[list[Entry]]) -> None:
        self._queue.extend(units)
        self._pump_soon()


def _by_group(entries: Iterable[Entry]) -> list[list[Entry]]:
    """The entries by ticket and group, in order."""
    groups: dict[tuple[int, str], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((id(entry.ticket), entry.item.group_id), []).append(entry)
    return list(groups.values())


def _rank(endpoint: RewardEndpoint, avoid: str) -> tuple[bool, int, float]:
    """Sort key of endpoints: not where the item failed, then least outstanding, then idle longest."""
    return endpoint.address == avoid, endpoint.outstanding, endpoint.last_start


def _refuse_closed(entries: Iterable[Entry]) -> None:
    for entry in entries:
        message = "the reward client is closed"
        entry.resolve(error_result(entry.item.item_id, "closed", message, retryable=False))


def _in_words(error: CallError) -> str:
    """A failed call, after its endpoint's name."""
    return "does not answer in time" if error.status is grpc.StatusCode.DEADLINE_EXCEEDED else str(error)


def _describe_failure(status: grpc.StatusCode, what: str, timeout_s: float) -> tuple[str, str]:
    """(code, message) of an item after a failed call."""
    if status in _LOST:
        return "unreachable", what
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "timeout", f"{what} (calls get {timeout_s:g} s)"
    if status is grpc.StatusCode.UNIMPLEMENTED:
        return "endpoint", f"{what} (is it a rollmesh.v1.Reward server?)"
    if status is grpc.StatusCode.UNAUTHENTICATED:
        return (
            "endpoint",
            f"{what} (a service with the mesh's token must join the mesh, not be listed in reward.endpoints)",
        )
    return "endpoint", what
