"""The buffer's client: unary calls with deadlines and retries, and the three standing streams.

Every call is idempotent under repetition, so calls are simply repeated while failures are transient, for up to
`retry_s` seconds; then `UnreachableError`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from rollmesh.buffer.client.admit_stream import AdmitStream
from rollmesh.buffer.client.fetch import fetch, fetch_side
from rollmesh.buffer.client.pending_write import PendingWrite
from rollmesh.buffer.client.sample_stream import ReceivedGroup, SampleStream, SampleUpdate
from rollmesh.buffer.client.upload import Uploader
from rollmesh.buffer.client.write_stream import WriteResult, WriteStream
from rollmesh.buffer.protocol.leases import Lease
from rollmesh.mesh.errors import LostStateError
from rollmesh.mesh.rpc.retries import call_with_retry
from rollmesh.mesh.tables import TRAIN
from rollmesh.protos import buffer_pb2 as pb
from rollmesh.protos import buffer_pb2_grpc
from rollmesh.protos import trajectory_pb2 as trajectory

__all__ = [
    "AdmitStream",
    "BufferClient",
    "Lease",
    "PendingWrite",
    "ReceivedGroup",
    "SampleStream",
    "SampleUpdate",
    "WriteResult",
    "WriteStream",
]
_SEED_BYTES = 512 << 10
_USES_AT_ONCE = 512
# Redis may be restarted again while the learner restores what the last restart has lost.
_RECOVERIES = 5


class BufferClient:
    """Client of one buffer.

    Args:
        channel: to the mesh address (see `mesh.rpc.channel.open_channel`).
        timeout_s: deadline of one try.
        retry_s: seconds for all tries of a call together.
    """

    def __init__(self, channel: grpc.aio.Channel, *, timeout_s: float, retry_s: float) -> None:
        self._channel = channel
        self._stub: Any = buffer_pb2_grpc.BufferStub(channel)
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._number = 0
        self._uploader = Uploader(self._stub, timeout_s, retry_s)
        self.on_lost_state: Callable[[], Awaitable[None]] | None = None
        """Restores state that Redis has lost, for a learner; the call that failed is then repeated."""

    def _next_call(self) -> int:
        """A call number above all before, of this process and its predecessors: late copies of a call do not count."""
        self._number = max(self._number + 1, time.time_ns() // 1000)
        return self._number

    async def _call(self, method: Callable[..., Any], request: Any, what: str) -> Any:
        return await call_with_retry(lambda: method(request, timeout=self._timeout_s), retry_s=self._retry_s, what=what)

    async def _call_with_recovery(self, method: Callable[..., Any], request: Any, what: str) -> Any:
        """Calls as `_call`, and repeats the call once the learner has restored state that Redis had lost."""
        for _ in range(_RECOVERIES):
            try:
                return await self._call(method, request, what)
            except LostStateError:
                if self.on_lost_state is None:
                    raise
                await self._recover()
        return await self._call(method, request, what)

    async def _recover(self) -> None:
        if self.on_lost_state is not None:
            await self.on_lost_state()

    async def reassert(
        self,
        incarnation: int,
        member_id: str,
        version: int,
        committed: int,
        checkpoint: str,
        takeovers: Sequence[pb.Takeover],
        uses: Sequence[pb.AssertedUse],
    ) -> tuple[int, int]:
        """Reports again which groups the learner has used (table `train`).

        Returns:
            Groups that Redis believed unused, and groups that it did not know.

        Raises:
            LostStateError: Redis was restarted meanwhile, or is not ready for it yet: to be begun again.
            FencedError: another learner has taken the run over.
        """

        async def send_uses(uses: Sequence[pb.AssertedUse], *, more: bool, doubt: int) -> pb.ReassertResponse:
            request = pb.ReassertRequest(
                table=TRAIN,
                incarnation=incarnation,
                member_id=member_id,
                version=version,
                committed=committed,
                checkpoint=checkpoint,
                takeovers=takeovers,
                uses=uses,
                more=more,
                doubt=doubt,
            )
            reply: pb.ReassertResponse = await self._call(
                self._stub.Reassert, request, "reporting again which groups were used"
            )
            return reply

        doubt = (await send_uses([], more=True, doubt=0)).doubt
        if not doubt:
            return 0, 0
        corrected = unknown = 0
        for start in range(0, max(1, len(uses)), _USES_AT_ONCE):
            end = start + _USES_AT_ONCE
            reply = await send_uses(uses[start:end], more=end < len(uses), doubt=doubt)
            corrected, unknown = corrected + reply.corrected, unknown + reply.unknown
        return corrected, unknown

    async def seed(
        self,
        table: str,
        incarnation: int,
        tasks: Sequence[trajectory.PromptTask],
        *,
        end_of_data: bool = False,
        withdraw_pending: bool = False,
    ) -> pb.SeedResponse:
        """Adds prompt tasks, in increasing order of ordinals; those seeded before are ignored.

        Sent in several messages when large; the answer then sums up `added` and `withdrawn`.
        """
        portions = _by_bytes(tasks, _SEED_BYTES)
        added = withdrawn = 0
        for index, portion in enumerate(portions):
            request = pb.SeedRequest(
                table=table,
                incarnation=incarnation,
                tasks=portion,
                end_of_data=end_of_data and index == len(portions) - 1,
                withdraw_pending=withdraw_pending and index == 0,
                call=self._next_call(),
            )
            # After a loss the tasks to be seeded for training may be others: the caller begins again.
            call = self._call if table == TRAIN else self._call_with_recovery
            response: pb.SeedResponse = await call(self._stub.Seed, request, "seeding prompt tasks")
            added, withdrawn = added + response.added, withdrawn + response.withdrawn
        response.added, response.withdrawn = added, withdrawn
        return response

    async def claim(
        self, table: str, incarnation: int, train_version: int, leases: Sequence[pb.LeaseRef]
    ) -> pb.ClaimResponse:
        """Turns leased groups into consumed ones, all or none, before the optimizer step that uses them."""
        request = pb.ClaimRequest(table=table, incarnation=incarnation, train_version=train_version, leases=leases)
        response: pb.ClaimResponse = await self._call(self._stub.Claim, request, "claiming a batch")
        return response

    async def commit(self, table: str, incarnation: int, version: int, checkpoint: str = "") -> pb.CommitResponse:
        """Reports that the state containing every use below `version` is durable."""
        request = pb.CommitRequest(table=table, incarnation=incarnation, version=version, checkpoint=checkpoint)
        response: pb.CommitResponse = await self._call_with_recovery(self._stub.Commit, request, "committing")
        return response

    async def resume(
        self, table: str, member_id: str, resume_version: int, *, takeover: bool = False, force: bool = False
    ) -> pb.ResumeResponse:
        """Takes the run over under the next incarnation. However often it is repeated, it is one takeover.

        Raises:
            TakeoverRefusedError: another learner holds the run.
            DataError: the version is below the last commit.
        """
        request = pb.ResumeRequest(
            table=table,
            member_id=member_id,
            resume_version=resume_version,
            takeover=takeover,
            force=force,
            call=self._next_call(),
        )
        response: pb.ResumeResponse = await self._call(self._stub.Resume, request, "resuming the run")
        return response

    async def nack(
        self,
        table: str,
        incarnation: int,
        leases: Sequence[pb.LeaseRef],
        disposition: pb.NackDisposition,
        reason: str = "",
    ) -> pb.NackResponse:
        """Gives leased groups back: to ready, or to a fate counted under `reason`."""
        request = pb.NackRequest(
            table=table, incarnation=incarnation, leases=leases, disposition=disposition, reason=reason
        )
        response: pb.NackResponse = await self._call_with_recovery(self._stub.Nack, request, "giving groups back")
        return response

    async def release(
        self, table: str, member_id: str, generation: int, leases: Sequence[pb.LeaseRef]
    ) -> pb.ReleaseResponse:
        """Gives up groups being generated; members written so far stay."""
        request = pb.ReleaseRequest(table=table, member_id=member_id, generation=generation, leases=leases)
        response: pb.ReleaseResponse = await self._call(self._stub.Release, request, "releasing groups")
        return response

    async def set_policy_version(self, incarnation: int, version: int) -> int:
        """Reports that weights of this version can be fetched; returns the version in force."""
        request = pb.SetPolicyVersionRequest(incarnation=incarnation, version=version)
        response: pb.SetPolicyVersionResponse = await self._call_with_recovery(
            self._stub.SetPolicyVersion, request, "announcing a version"
        )
        return response.version

    async def set_priorities(
        self, table: str, incarnation: int, priorities: Mapping[str, float]
    ) -> pb.SetPrioritiesResponse:
        """Weights of groups, by id, in the draws of `order: priority`; groups that have ended are passed over."""
        items = [pb.GroupPriority(group_id=group_id, priority=value) for group_id, value in priorities.items()]
        request = pb.SetPrioritiesRequest(
            table=table, incarnation=incarnation, priorities=items, call=self._next_call()
        )
        response: pb.SetPrioritiesResponse = await self._call_with_recovery(
            self._stub.SetPriorities, request, "setting priorities"
        )
        return response

    async def describe(self, table: str) -> pb.DescribeResponse:
        """Metrics of a table."""
        response: pb.DescribeResponse = await self._call(
            self._stub.Describe, pb.DescribeRequest(table=table), "describing a table"
        )
        return response

    async def ledger(self, table: str, failed_limit: int = 0) -> pb.LedgerResponse:
        """Counters, recount and their disagreements."""
        request = pb.LedgerRequest(table=table, failed_limit=failed_limit)
        response: pb.LedgerResponse = await self._call(self._stub.Ledger, request, "reading the ledger")
        return response

    async def holders(self, table: str, limit: int = 0) -> pb.HoldersResponse:
        """The holders of groups, those that have held one for longest first; at most `limit`, unless that is 0."""
        request = pb.HoldersRequest(table=table, limit=limit)
        response: pb.HoldersResponse = await self._call(self._stub.Holders, request, "reading the holders of groups")
        return response

    async def redrive(self, table: str, group_ids: Sequence[str] = ()) -> pb.RedriveResponse:
        """Queues prompts of failed groups again, as new groups; no ids: all that are kept."""
        request = pb.RedriveRequest(table=table, group_ids=group_ids)
        response: pb.RedriveResponse = await self._call(self._stub.Redrive, request, "queueing failed groups again")
        return response

    async def fetch(self, table: str, refs: Sequence[pb.MemberRef]) -> AsyncIterator[bytes]:
        """Payloads in the order of `refs`; continues where it stopped when the connection breaks."""
        async for payload in fetch(self._stub, table, refs, retry_s=self._retry_s):
            yield payload

    async def upload_side(
        self, table: str, grant: pb.GroupGrant, member: int, name: str, data: bytes | NDArray[np.generic]
    ) -> trajectory.SideData:
        """Stores large data of a member next to its payload; the answer belongs into its `MemberMeta.side`."""
        return await self._uploader.side(table, grant, member, name, data)

    async def fetch_side(
        self, table: str, group_id: str, member: int, entry: trajectory.SideData
    ) -> bytes | NDArray[np.generic]:
        """Side data by its entry in `MemberMeta.side`, its digest verified; an array where it was one."""
        return await fetch_side(self._stub, table, group_id, member, entry, retry_s=self._retry_s)

    def admit(self, table: str, member_id: str, generation: int | Callable[[], int]) -> AdmitStream:
        """Opens the standing stream of grants; a callable generation is read at every (re)connection."""
        return AdmitStream(self._stub, table, member_id, _callable(generation), self._retry_s)

    def writer(self, table: str, member_id: str, generation: int | Callable[[], int]) -> WriteStream:
        """Opens the standing stream of writes."""
        return WriteStream(self._channel, table, member_id, _callable(generation), self._retry_s, self._uploader)

    def sample(self, table: str, incarnation: int, *, with_payloads: bool = True) -> SampleStream:
        """Opens the standing stream of leased groups."""
        return SampleStream(self._channel, table, incarnation, with_payloads, self._retry_s, self._recover)


def _callable(generation: int | Callable[[], int]) -> Callable[[], int]:
    if callable(generation):
        return generation
    fixed = generation
    return lambda: fixed


def _by_bytes(tasks: Sequence[trajectory.PromptTask], limit: int) -> list[list[trajectory.PromptTask]]:
    """Cuts tasks into messages of bounded size; at least one."""
    portions: list[list[trajectory.PromptTask]] = [[]]
    size = 0
    for task in tasks:
        if size >= limit:
            portions.append([])
            size = 0
        portions[-1].append(task)
        size += task.ByteSize()
    return portions
