"""The learner's side of the buffer's Sample stream: groups arrive ahead of the step that trains them.

Invariants:
- this is the only record of the groups that the learner holds: by version, each group once, under its newest lease;
- a group stays in it until it is claimed, returned or lost, and until then its lease is named to the buffer;
- how many more to request is always counted from it, so that a lost group is requested again;
- every credit names the version at which its group will train;
- a group that cannot be read is returned as failed and replaced at the same version;
- every wait has a reason (`waiting_reason`).

All methods belong to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from rollmesh.buffer.client.client import BufferClient, Lease, ReceivedGroup
from rollmesh.learner.rollouts.group import SampledGroup, decode_group, unsent_members
from rollmesh.mesh.errors import DataError, PayloadError, RollmeshError, ended_by
from rollmesh.mesh.runtime.background_tasks import BackgroundTasks
from rollmesh.mesh.tables import TRAIN
from rollmesh.protos import buffer_pb2

log = logging.getLogger(__name__)
UNREADABLE = "payload_invalid"
"""The reason why a group that cannot be read has failed."""
# Seconds between readings of the reason for a wait.
_RECHECK_S = 1.0


class Interrupted(Exception):  # noqa: N818  # no failure: the waiter was asked to stop
    """A wait for groups ended early: there is a request to the waiter."""


class GroupStream:
    """Leases groups for the versions to come.

    Args:
        client: of the buffer.
        incarnation: of this learner.
        with_payloads: groups come with their payloads (one rank).
    """

    def __init__(self, client: BufferClient, incarnation: int, *, with_payloads: bool, table: str = TRAIN) -> None:
        self._client = client
        self._incarnation = incarnation
        self._with_payloads = with_payloads
        self._table = table
        self._stream = client.sample(table, incarnation, with_payloads=with_payloads)
        self._stream.holdings = self._leases
        self._groups: defaultdict[int, dict[str, SampledGroup]] = defaultdict(dict)
        self._requested: dict[int, int] = {}
        # Received and not decoded yet; returned and not acknowledged yet.
        self._decoding: list[ReceivedGroup] = []
        self._returning: set[Lease] = set()
        self._finished_version = -1
        self._changed = asyncio.Event()
        self._exhausted = False
        self._interrupted = False
        self._error: RollmeshError | None = None
        self._reason = ""
        self._tasks = BackgroundTasks(self._on_task_error)
        self.on_waiting: Callable[[str], None] = lambda _reason: None
        """Called with the reason of a wait for groups whenever it is known; empty when the wait ends."""

    def start(self) -> None:
        """Begins to read the stream."""
        self._tasks.spawn(self._read_stream(), "sample")

    async def close(self) -> None:
        """Stops reading. Leases that were not claimed end with the learner's membership."""
        await self._tasks.close()
        await self._stream.close()

    @property
    def exhausted(self) -> bool:
        """The data has ended: no further group will come."""
        return self._exhausted

    @property
    def waiting_reason(self) -> str:
        """The buffer's latest reason why no groups come; empty when they come."""
        return self._reason

    def request(self, version: int, count: int) -> None:
        """Requests groups, so that `count` in all are held or on their way for training at `version`."""
        self._requested[version] = count
        self._request_missing(version)

    async def next_batch(self, version: int, count: int, timeout_s: float) -> list[SampledGroup]:
        """Waits until `count` groups are held for training at `version`, fewer only where the data has ended.

        They stay held: the next call gives the same ones, apart from those that were lost or returned meanwhile.

        Raises:
            Interrupted: `interrupt` was called, or `timeout_s` has passed.
            FencedError: another learner has taken over.
            UnreachableError: the buffer was away for longer than clients retry.
        """
        self.request(version, count)
        try:
            async with asyncio.timeout(timeout_s):
                while len(self._groups[version]) < count and not self._exhausted:
                    self._raise_if_ended()
                    self._changed.clear()
                    self.on_waiting(self._reason)
                    await self._changed.wait()
        except TimeoutError:
            raise Interrupted from None
        finally:
            self.on_waiting("")
        self._raise_if_ended()
        return list(self._groups[version].values())[:count]

    def finish_version(self, version: int, groups: Collection[SampledGroup]) -> None:
        """Ends a version after its batch is claimed; returns other groups that were held for it."""
        used = {group.key for group in groups}
        self._finished_version = version
        self._requested = {later: count for later, count in self._requested.items() if later > version}
        over = [self._groups.pop(earlier) for earlier in sorted(self._groups) if earlier <= version]
        self._release([group.key for held in over for group in held.values() if group.key not in used])

    def drop_refused(self, leases: Iterable[Lease]) -> None:
        """Drops groups with leases that cannot be claimed, and requests others."""
        self._release(self._remove(set(leases)))

    async def return_groups(
        self, groups: Sequence[SampledGroup], disposition: buffer_pb2.NackDisposition, reason: str
    ) -> None:
        """Returns groups that will not be trained: their leases end."""
        await self._nack(self._remove({group.key for group in groups}), disposition, reason)

    def interrupt(self) -> None:
        """Ends the present wait, or else the next one."""
        self._interrupted = True
        self._changed.set()

    def fail(self, error: RollmeshError) -> None:
        """Ends the present and every further wait with an error."""
        self._error = self._error or error
        self._changed.set()

    def _raise_if_ended(self) -> None:
        if self._error is not None:
            raise self._error
        if self._interrupted:
            self._interrupted = False
            raise Interrupted

    # -------------------------------------------------------------------------------------------------- held groups

    def _leases(self) -> Iterator[Lease]:
        """The leases that the learner holds, from their arrival until they are known to be gone."""
        for held in self._groups.values():
            yield from (group.key for group in held.values())
        yield from (arrived.lease for arrived in self._decoding)
        yield from self._returning

    def _request_missing(self, version: int) -> None:
        coming = sum(arrived.leased.for_version == version for arrived in self._decoding)
        coming += self._stream.outstanding(version)
        missing = self._requested.get(version, 0) - len(self._groups[version]) - coming
        if missing > 0:
            # Groups that were refused or given back may have become ready again: the buffer answers again.
            self._exhausted = False
            self._stream.request(missing, version)

    def _remove(self, leases: Collection[Lease]) -> list[Lease]:
        """Removes held groups by lease; returns the leases that were there, and requests as many others."""
        found = []
        for held in self._groups.values():
            gone = [group.key for group in held.values() if group.key in leases]
            for group_id, _ in gone:
                del held[group_id]
            found += gone
        if found:
            self._request_all_missing()
        return found

    def _request_all_missing(self) -> None:
        for version in self._requested:
            self._request_missing(version)

    def _add(self, group: SampledGroup) -> bool:
        """Holds a group under its newest lease; False where it was held under an earlier one, whatever the version."""
        earlier = [held.pop(group.group_id, None) for held in self._groups.values()]
        self._groups[group.leased.for_version][group.group_id] = group
        return not any(earlier)

    def _release(self, leases: Sequence[Lease]) -> None:
        """Returns, in the background, leases that may be alive and are not used."""
        if leases:
            nack = self._nack(leases, buffer_pb2.NACK_DISPOSITION_RELEASE, "not used")
            self._tasks.spawn(nack, "giving back")

    def _on_task_error(self, name: str, error: BaseException) -> None:
        """Ends every wait for groups with the error of a background task, which no other task replaces."""
        if not isinstance(error, RollmeshError):
            log.error("the learner's task %r failed", name, exc_info=error)
        self.fail(ended_by(error, f"the learner's task {name!r}"))

    async def _nack(self, leases: Sequence[Lease], disposition: buffer_pb2.NackDisposition, reason: str) -> None:
        self._returning.update(leases)
        refs = [lease.to_proto() for lease in leases]
        try:
            await self._client.nack(self._table, self._incarnation, refs, disposition=disposition, reason=reason)
        finally:
            self._returning.difference_update(leases)
            self._stream.forget(leases)

    # --------------------------------------------------------------------------------------------------- reading

    async def _read_stream(self) -> None:
        while True:
            response = await self._stream.next(_RECHECK_S)
            self._reason = self._stream.waiting_reason
            if response is not None:
                self._exhausted = self._exhausted or response.exhausted
                self._remove({Lease.of(lost) for lost in response.lost})
                await self._add_arrived(response.groups)
            self._changed.set()

    async def _add_arrived(self, groups: Sequence[ReceivedGroup]) -> None:
        self._decoding = list(groups)
        added = True
        while self._decoding:
            added = await self._decode_arrived(self._decoding[0]) and added
            del self._decoding[0]
        if not added:
            self._request_all_missing()

    async def _decode_arrived(self, arrived: ReceivedGroup) -> bool:
        """Decodes and holds a group; False where there is not one more by it."""
        leased = arrived.leased
        if leased.for_version <= self._finished_version:
            self._release([arrived.lease])
            return False
        try:
            fetched = await fetch_unsent(self._client, self._table, leased) if self._with_payloads else {}
            payloads = arrived.payloads if self._with_payloads else None
            return self._add(decode_group(leased, payloads, fetched))
        except (PayloadError, DataError) as error:
            log.warning("group %s is unusable: %s", leased.group_id, error, extra={"group": leased.group_id})
            await self._nack([arrived.lease], buffer_pb2.NACK_DISPOSITION_FAIL, UNREADABLE)
            return False


async def fetch_unsent(client: BufferClient, table: str, leased: buffer_pb2.LeasedGroup) -> dict[int, bytes]:
    """Payloads, by member, that are too large to come with the lease.

    Raises:
        DataError: the group has ended meanwhile.
        UnreachableError: the buffer stayed away.
    """
    members = unsent_members(leased)
    refs = [buffer_pb2.MemberRef(group_id=leased.group_id, member=member) for member in members]
    fetched = [data async for data in client.fetch(table, refs)]
    return dict(zip(members, fetched, strict=True))
