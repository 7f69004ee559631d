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
from functools import partial
from itertools import accumulate, chain

import grpc

from rollmesh.mesh.runtime.background_tasks import BackgroundTasks, log_errors
from rollmesh.mesh.wait import NO_WAIT, Wait
from rollmesh.protos import membership_pb2, reward_pb2
from rollmesh.reward_service.client.call import Call
from rollmesh.reward_service.client.endpoint import RewardEndpoint, close_all
from rollmesh.reward_service.client.failed_calls import HOPELESS, LOST, describe_failure, in_words
from rollmesh.reward_service.client.outgoing import ItemDetails
from rollmesh.reward_service.client.tickets import Entry, Ticket
from rollmesh.reward_service.client.transports.interface import CallError, Connect
from rollmesh.reward_service.outcomes import error_result

log = logging.getLogger(__name__)

_RETRY_BASE_S = 0.05
_RETRY_LONGEST_S = 1.0
# Seconds for which items that a call returns wait for others of their group.
_GATHER_S = 0.02


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

    @property
    def scorers(self) -> dict[str, str]:
        """Versions by name of the scorers of all endpoints that have told them."""
        return {name: version for e in self._endpoints.values() for name, version in e.info.scorers.items()}

    @property
    def needs_group(self) -> bool:
        """True if an endpoint has said that it needs groups."""
        return any(endpoint.info.needs_group for endpoint in self._endpoints.values())

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

    async def score(
        self,
        items: Sequence[reward_pb2.ScoreItem],
        *,
        timeout_s: float,
        details: Sequence[ItemDetails] | None = None,
    ) -> list[reward_pb2.ScoreResult]:
        """Scores items: one result per item, in order.

        Args:
            timeout_s: seconds without an answer of any endpoint, or since its first failure, after which an item ends.
            details: of each item, for servers that want more of it.
        """
        loop = asyncio.get_running_loop()
        ticket = Ticket(items, loop.time(), details)
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
            batch = self._next_batch(endpoint)
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

    def _next_batch(self, endpoint: RewardEndpoint) -> list[Entry]:
        """Open entries for one request, by whole groups where they fit; at most one group beyond the free items."""
        limit, most_bytes = endpoint.max_items, endpoint.max_bytes or math.inf
        batch: list[Entry] = []
        ids: set[str] = set()
        size = 0
        while self._queue:
            unit = [entry for entry in self._queue.popleft() if entry.result is None]
            sizes = [entry.size(endpoint.wants) for entry in unit]
            large = len(batch) + len(unit) > limit or size + sum(sizes) > most_bytes
            if batch and (large or not ids.isdisjoint(e.item.item_id for e in unit)):
                self._queue.appendleft(unit)
                break
            if large:
                sizes = [entry.outgoing(endpoint.wants).ByteSize() for entry in unit]
                taken = _fitting(sizes, limit, most_bytes)
                whole = endpoint.info.needs_group and taken < len(unit)
                refused = unit if whole else unit[: int(not taken)]
                _refuse_large(refused, endpoint, sum(sizes[: len(refused)]))
                taken = 0 if whole else taken
                if rest := unit[max(taken, len(refused)) :]:
                    self._queue.appendleft(rest)
                unit = unit[:taken]
            batch.extend(unit)
            ids.update(entry.item.item_id for entry in unit)
            size += sum(sizes[: len(unit)])
            if size >= endpoint.enough_bytes or len(batch) >= min(limit, endpoint.free_items):
                break
        return batch

    async def _send(self, endpoint: RewardEndpoint, batch: list[Entry]) -> None:
        call = Call(endpoint.address, batch, self._limits.attempts, needs_group=endpoint.info.needs_group)
        try:
            items = await _outgoing(endpoint, batch)
            await endpoint.score(items, self._limits.timeout_s, partial(self._on_result, endpoint, call))
        except asyncio.CancelledError:
            if call.timer is not None:
                call.timer.cancel()
            _refuse_closed(batch)
            raise
        except CallError as error:
            self._on_broken_call(endpoint, call, error)
        except Exception as error:  # no answer may leave its items without a result
            log.exception("a call to %s failed", endpoint.address)
            self._on_broken_call(endpoint, call, _unforeseen(error))
        else:
            self._on_answered_call(endpoint, call, len(batch))
        finally:
            self._on_call_ended(endpoint, call.unanswered)

    async def _describe(self, endpoint: RewardEndpoint) -> None:
        try:
            await endpoint.describe()
            endpoint.circuit.record_sign_of_life()
        except CallError as error:
            self._on_no_description(endpoint, error)
        except Exception as error:  # it would be asked again at once
            log.exception("%s could not be described", endpoint.address)
            self._on_no_description(endpoint, _unforeseen(error))
        finally:
            self._on_call_ended(endpoint, 0)

    def _on_no_description(self, endpoint: RewardEndpoint, error: CallError) -> None:
        now = asyncio.get_running_loop().time()
        endpoint.circuit.record_failure(now, in_words(error), fatal=True, pause_s=error.retry_after_s or 0.0)

    def _on_call_ended(self, endpoint: RewardEndpoint, items: int) -> None:
        endpoint.end(items)
        if endpoint.address not in self._endpoints and not endpoint.busy:
            self._tasks.spawn(endpoint.close(), f"closing the connection to {endpoint.address}")
        self._pump_soon()

    # ------------------------------------------------------------------------------------------ answers

    def _on_result(self, endpoint: RewardEndpoint, call: Call, result: reward_pb2.ScoreResult) -> bool:
        """Takes a result of a call in progress; True while more are missing."""
        loop = asyncio.get_running_loop()
        endpoint.circuit.record_success()
        self._heard_at = loop.time()
        if call.accept(result, self._heard_at):
            endpoint.answered()
            if call.returns:
                self._take_back_soon(endpoint, call)
            if self._queue:
                self._pump_soon()
        return not call.done

    def _on_answered_call(self, endpoint: RewardEndpoint, call: Call, items: int) -> None:
        """Deals with a call that has ended well."""
        endpoint.circuit.record_success()
        self._heard_at = asyncio.get_running_loop().time()
        call.miss(self._heard_at)
        if call.strange:
            log.warning(
                "%s answered for %d items that were not in the call, or again, such as %r",
                endpoint.address,
                len(call.strange),
                call.strange[0],
            )
        if not self._take_back(endpoint, call):
            endpoint.on_success(items)

    def _take_back_soon(self, endpoint: RewardEndpoint, call: Call) -> None:
        """Queues what a call returns once its other results of this moment are there: groups stay together."""
        if call.timer is None:
            later = asyncio.get_running_loop().call_later
            call.timer = later(_GATHER_S, lambda: self._take_back(endpoint, call))

    def _take_back(self, endpoint: RewardEndpoint, call: Call) -> bool:
        """Queues what a call returns; True if the server could not begin all that it has."""
        if call.timer is not None:
            call.timer.cancel()
            call.timer = None
        waiting, again = call.take_back()
        self._retry(again)
        if waiting:
            call.refused = True
            endpoint.narrow_window(endpoint.outstanding + call.answered)
            self._requeue_first(waiting)
        return call.refused

    def _on_broken_call(self, endpoint: RewardEndpoint, call: Call, error: CallError) -> None:
        """Deals with a call that has failed, perhaps after some results."""
        self._take_back(endpoint, call)
        if left := call.left():
            self._on_failed_call(endpoint, left, error)

    def _on_failed_call(self, endpoint: RewardEndpoint, batch: list[Entry], error: CallError) -> None:
        now = asyncio.get_running_loop().time()
        status, trouble = error.status, in_words(error)
        what = f"{endpoint.address}: {trouble}"
        lost = status in LOST
        endpoint.described &= not lost
        fatal = lost or error.throttled or status in HOPELESS
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
        code, message = describe_failure(status, what, self._limits.timeout_s)
        for entry in batch:
            entry.attempts += not lost
            entry.record_failure(code, message, retryable=status not in HOPELESS, address=endpoint.address, now=now)
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
        by_pause: dict[float, list[list[Entry]]] = {}
        for unit in units:
            by_pause.setdefault(max(map(_pause, unit)), []).append(unit)
        for pause, together in by_pause.items():
            self._requeue_later(together, pause)

    def _requeue_later(self, units: list[list[Entry]], pause: float) -> None:
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
        groups.setdefault(entry.unit, []).append(entry)
    return list(groups.values())


def _unforeseen(error: Exception) -> CallError:
    """A failure that no transport foresees, as one of the call."""
    return CallError(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")


def _rank(endpoint: RewardEndpoint, avoid: str) -> tuple[bool, int, float]:
    """Sort key of endpoints: not where the item failed, then least outstanding, then idle longest."""
    return endpoint.address == avoid, endpoint.outstanding, endpoint.last_start


def _pause(entry: Entry) -> float:
    """Seconds before an item is tried again: as the server asked, and at least a growing pause."""
    return max(entry.retry_after_s, min(_RETRY_LONGEST_S, _RETRY_BASE_S * 2 ** max(0, entry.attempts - 1)))


def _fitting(sizes: Sequence[int], limit: int, most_bytes: float) -> int:
    """Number of the first items that fit into one request."""
    return sum(total <= most_bytes for total in accumulate(sizes[:limit]))


async def _outgoing(endpoint: RewardEndpoint, batch: Sequence[Entry]) -> list[reward_pb2.ScoreItem]:
    """The items as an endpoint wants them."""
    wants = endpoint.wants

    def make() -> list[reward_pb2.ScoreItem]:
        return [entry.outgoing(wants) for entry in batch]

    return await asyncio.to_thread(make) if wants.takes_a_while else make()


def _refuse_large(entries: Sequence[Entry], endpoint: RewardEndpoint, size: int) -> None:
    """Ends items that no request to their endpoint can hold."""
    what = f"a group of {len(entries)} items and up to {size} bytes" if len(entries) > 1 else f"up to {size} bytes"
    most = f"{endpoint.max_items} items" + (f" and {endpoint.max_bytes} bytes" if endpoint.max_bytes else "")
    for entry in entries:
        message = f"{endpoint.address} takes {most} in a request; this is {what}"
        entry.resolve(error_result(entry.item.item_id, "too_large", message, retryable=False))


def _refuse_closed(entries: Iterable[Entry]) -> None:
    for entry in entries:
        message = "the reward client is closed"
        entry.resolve(error_result(entry.item.item_id, "closed", message, retryable=False))
