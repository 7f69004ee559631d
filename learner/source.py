"""The learner's side of the buffer's Sample stream: groups arrive ahead of the step that trains them.

Invariants: every credit names the version at which its group will train, and groups of different versions are never
mixed; a group that cannot be read is given back as failed and replaced at the same version; nobody waits in silence
(`waiting_reason`). All methods belong to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence

from buffer.client import Arrived, BufferClient
from learner.groups import SampledGroup, open_group
from learner.payloads import fetch_left_out
from mesh.errors import DataError, FencedError, PayloadError, RollmeshError
from protos import buffer_pb2

_log = logging.getLogger(__name__)
# How often the reason for a wait is looked at.
_LOOK_S = 1.0


class Interrupted(Exception):  # noqa: N818  # no failure: somebody asked the waiter to stop
    """A wait for groups ended early: somebody wants the waiter's attention."""


class GroupSource:
    """Leases groups for the versions to come.

    Args:
        client: of the buffer.
        incarnation: of this learner.
        with_payloads: groups come with their payloads (one rank).
    """

    def __init__(self, client: BufferClient, incarnation: int, *, with_payloads: bool, table: str = "train") -> None:
        self._client = client
        self._incarnation = incarnation
        self._with_payloads = with_payloads
        self._table = table
        self._stream = client.sample(table, incarnation, with_payloads=with_payloads)
        self._held: dict[int, list[SampledGroup]] = defaultdict(list)
        self._asked: dict[int, int] = defaultdict(int)
        self._changed = asyncio.Event()
        self._exhausted = False
        self._interrupted = False
        self._error: RollmeshError | None = None
        self._reason = ""
        self._pump_task: asyncio.Task[None] | None = None
        self.on_waiting: Callable[[str], None] = lambda _reason: None
        """Called with the reason whenever a wait for groups is told one; empty when it ends."""

    def start(self) -> None:
        """Begins to read the stream."""
        self._pump_task = asyncio.create_task(self._pump(), name="sample")

    async def close(self) -> None:
        """Stops reading. Leases that were not claimed end with the learner's membership."""
        if self._pump_task is not None:
            self._pump_task.cancel()
            await asyncio.gather(self._pump_task, return_exceptions=True)
        await self._stream.close()

    @property
    def exhausted(self) -> bool:
        """The data has ended: no further group will come."""
        return self._exhausted

    @property
    def waiting_reason(self) -> str:
        """Why nothing comes at present, as the buffer last said; empty when groups come."""
        return self._reason

    def want(self, version: int, count: int) -> None:
        """Asks for groups so that `count` in all are on their way for training at `version`."""
        missing = count - self._asked[version]
        if missing > 0:
            # Groups that were refused or given back may have become ready again: the buffer answers anew.
            self._exhausted = False
            self._asked[version] = count
            self._stream.request(missing, version)

    async def take(self, version: int, count: int, timeout_s: float) -> list[SampledGroup]:
        """Exactly `count` groups to train at `version`, fewer only where the data has ended.

        Raises:
            Interrupted: `interrupt` was called, or `timeout_s` has passed; what has come stays for the next call.
            FencedError: another learner has taken over.
            UnreachableError: the buffer was away for longer than clients retry.
        """
        held = self._held[version]
        self.want(version, count)
        try:
            async with asyncio.timeout(timeout_s):
                while len(held) < count and not self._exhausted:
                    self._raise_if_over()
                    self._changed.clear()
                    self.on_waiting(self._reason)
                    await self._changed.wait()
        except TimeoutError:
            raise Interrupted from None
        finally:
            self.on_waiting("")
        self._raise_if_over()
        taken, self._held[version] = held[:count], held[count:]
        self._asked[version] -= len(taken)
        return taken

    def forget(self, version: int) -> None:
        """Drops the bookkeeping of a version whose batch is claimed."""
        self._held.pop(version, None)
        self._asked.pop(version, None)

    async def give_back(
        self, groups: Sequence[SampledGroup], disposition: buffer_pb2.NackDisposition, reason: str
    ) -> None:
        """Ends the leases of groups that will not be trained."""
        leases = [group.lease for group in groups]
        await self._client.nack(self._table, self._incarnation, leases, disposition=disposition, reason=reason)

    def interrupt(self) -> None:
        """Ends the present wait, or else the next one."""
        self._interrupted = True
        self._changed.set()

    def fail(self, error: RollmeshError) -> None:
        """Ends the present and every further wait with an error."""
        self._error = self._error or error
        self._changed.set()

    def _raise_if_over(self) -> None:
        if self._error is not None:
            raise self._error
        if self._interrupted:
            self._interrupted = False
            raise Interrupted

    async def _pump(self) -> None:
        try:
            while True:
                response = await self._stream.next(_LOOK_S)
                self._reason = self._stream.waiting_reason
                if response is not None:
                    self._exhausted = self._exhausted or response.exhausted
                    for arrived in response.groups:
                        await self._arrive(arrived)
                self._changed.set()
        except RollmeshError as error:
            self.fail(error)

    async def _arrive(self, arrived: Arrived) -> None:
        leased, version = arrived.leased, arrived.leased.for_version
        try:
            fetched = await fetch_left_out(self._client, self._table, leased) if self._with_payloads else {}
            payloads = arrived.payloads if self._with_payloads else None
            self._held[version].append(open_group(leased, payloads, fetched))
        except (PayloadError, DataError) as error:
            _log.warning("group %s is unusable: %s", leased.group_id, error, extra={"group": leased.group_id})
            lease = buffer_pb2.LeaseRef(group_id=leased.group_id, lease_id=leased.lease_id)
            await self._client.nack(
                self._table,
                self._incarnation,
                [lease],
                disposition=buffer_pb2.NACK_DISPOSITION_FAIL,
                reason="payload_invalid",
            )
            self._stream.request(1, version)


def fenced_error() -> FencedError:
    """What a learner raises that was told it has been superseded."""
    return FencedError(
        "another learner has taken this run over", hint="nothing to do: the newer learner goes on with it"
    )
