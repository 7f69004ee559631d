"""The buffer's gRPC front: translates messages into commands. It keeps no state, and may run several times."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

from rollmesh.buffer.monitoring.bounded_answers import within_deadline
from rollmesh.buffer.monitoring.trajectory_spans import record_writes
from rollmesh.buffer.policy.draw_weights import weight_of
from rollmesh.buffer.protocol.leases import Lease, leases_of
from rollmesh.buffer.protocol.limits import group_bytes
from rollmesh.buffer.protocol.payload_framing import ParsedMessage, split_parser, split_payloads
from rollmesh.buffer.server.admit_session import AdmitSession
from rollmesh.buffer.server.fetch_handler import fetch_stream
from rollmesh.buffer.server.front_context import FrontContext
from rollmesh.buffer.server.holders import list_holders
from rollmesh.buffer.server.ledger import describe, ledger
from rollmesh.buffer.server.member_validation import check_message, check_write
from rollmesh.buffer.server.request_validation import (
    check_group_id,
    check_reassertion,
    check_tasks,
    checked_number,
)
from rollmesh.buffer.server.sample_session import SampleSession
from rollmesh.buffer.server.upload_handler import UploadHandler
from rollmesh.buffer.store.dead_letters import redrive
from rollmesh.buffer.store.errors import lost_state_error
from rollmesh.buffer.store.records import Write
from rollmesh.mesh.errors import DataError, FencedError, PayloadError, TakeoverRefusedError
from rollmesh.mesh.request_fields import check_id
from rollmesh.mesh.rpc.ordered_pipeline import answer_in_order
from rollmesh.mesh.tables import EVAL
from rollmesh.mesh.text import REASON_CHARACTERS, bounded
from rollmesh.mesh.trajectory.versions import checked_version
from rollmesh.protos import buffer_pb2 as pb
from rollmesh.protos import buffer_pb2_grpc

log = logging.getLogger(__name__)
Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])
# Messages of one Write stream under way: the next is checked while Redis stores the one before. More would only fill
# the caches with payloads: with three, those of 131 KB took a fifth more CPU.
_STORED_AT_ONCE = 2
_DISPOSITIONS = {
    pb.NACK_DISPOSITION_RELEASE: "release",
    pb.NACK_DISPOSITION_FILTER: "filter",
    pb.NACK_DISPOSITION_FAIL: "fail",
}


# Requests that are not parsed as generated code would.
DECODERS = {"/rollmesh.v1.Buffer/Write": split_parser(pb.WriteRequest, "payloads")}


def _stored(request: pb.WriteRequest, response: pb.WriteResponse) -> dict[str, object]:
    """The debug log's record of a message: `[group, member, attempt, scored]` per member it stored."""
    stored = [
        [write.group_id, write.meta.member, write.attempt, write.payload_bytes > 0]
        for write, status in zip(request.writes, response.statuses, strict=True)
        if status == pb.WRITE_STATUS_STORED and not write.draft
    ]
    return {"table": request.table, "member_id": request.member_id, "stored": stored}


def _for_learner(handler: Handler) -> Handler:
    """A handler of the learner's calls: work for generators makes room for it."""

    @wraps(handler)
    async def handle(servicer: BufferServicer, request: Any, context: Any) -> Any:
        with servicer._front.turns.serving_learner():
            return await handler(servicer, request, context)

    return cast(Handler, handle)


def _checked_leases(refs: Sequence[pb.LeaseRef]) -> list[Lease]:
    leases = leases_of(refs)
    for index, lease in enumerate(leases):
        check_group_id(f"leases[{index}].group_id", lease.group_id)
    return leases


class BufferServicer(buffer_pb2_grpc.BufferServicer):
    """The gRPC side of the commands.

    Args:
        front: what the front shares.
    """

    def __init__(self, front: FrontContext) -> None:
        self._front = front
        self._uploads = UploadHandler(front)

    @_for_learner
    async def Seed(self, request: pb.SeedRequest, _context: Any) -> pb.SeedResponse:
        """See buffer.proto."""
        table = self._front.checked_table(request.table)
        reserves = [group_bytes(task.n, task.sampling.max_tokens) for task in request.tasks]
        check_tasks(request.tasks, reserves, self._front.rules[table].max_bytes)
        added, seeded, pending, withdrawn = await self._front.store.seed(
            table,
            request.incarnation,
            request.tasks,
            end_of_data=request.end_of_data,
            withdraw=request.withdraw_pending,
            call=checked_number("call", request.call, least=1),
            reserves=reserves,
        )
        return pb.SeedResponse(added=added, seeded=seeded, pending=pending, withdrawn=withdrawn)

    async def Admit(
        self, request_iterator: AsyncIterator[pb.AdmitRequest], _context: Any
    ) -> AsyncIterator[pb.AdmitResponse | bytes]:
        """See buffer.proto."""
        async for response in self._stream(AdmitSession, request_iterator):
            yield response

    async def Write(
        self, request_iterator: AsyncIterator[ParsedMessage[pb.WriteRequest]], _context: Any
    ) -> AsyncIterator[pb.WriteResponse]:
        """See buffer.proto."""
        async for response in answer_in_order(request_iterator, self._write, _STORED_AT_ONCE):
            yield response

    async def _write(self, parts: ParsedMessage[pb.WriteRequest]) -> pb.WriteResponse:
        """Answers a message of writes when it is its turn."""
        async with self._front.turns.turn():
            return await self._store_members(parts)

    async def _store_members(self, parts: ParsedMessage[pb.WriteRequest]) -> pb.WriteResponse:
        """Stores members; one message is one round trip to Redis, however many members it carries."""
        request = parts.message
        table = self._front.checked_table(request.table)
        check_message(len(request.writes), len(parts.payloads))
        response = pb.WriteResponse(sequence=request.sequence)
        statuses = [pb.WRITE_STATUS_REJECTED] * len(request.writes)
        good: list[Write] = []
        positions: list[int] = []
        # If lengths do not add up, the bytes cannot be assigned to members: the stream ends, and nothing is stored.
        payloads = split_payloads(parts.payloads, [write.payload_bytes for write in request.writes])
        for position, (write, payload) in enumerate(zip(request.writes, payloads, strict=True)):
            try:
                checked = check_write(write, bytes(payload))
                if checked.pieces or checked.side:
                    await self._uploads.check(table, checked)
                good.append(checked)
                positions.append(position)
            except PayloadError as error:
                response.results.add(position=position, field=error.field, message=error.message)
        if good:
            began_ns = time.time_ns()
            outcomes = await self._front.store.write(table, good)
            if self._front.tracer.is_on:
                record_writes(self._front.tracer, table, good, outcomes, began_ns)
            for position, written in zip(positions, outcomes, strict=True):
                statuses[position] = written.status
                if written.sealed:
                    response.results.add(position=position, sealed=True)
                elif written.status == pb.WRITE_STATUS_REJECTED:
                    response.results.add(position=position, field="meta.member", message="the group has fewer members")
        response.statuses.extend(statuses)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("members stored", extra=_stored(request, response))
        return response

    async def Upload(self, request_iterator: AsyncIterator[pb.UploadRequest], _context: Any) -> pb.UploadResponse:
        """See buffer.proto."""
        return await self._uploads.handle(request_iterator)

    async def Sample(
        self, request_iterator: AsyncIterator[pb.SampleRequest], _context: Any
    ) -> AsyncIterator[pb.SampleResponse | bytes]:
        """See buffer.proto."""
        async for response in self._stream(SampleSession, request_iterator):
            yield response

    async def _stream(
        self, session: type[AdmitSession | SampleSession], requests: AsyncIterator[Any]
    ) -> AsyncIterator[Any]:
        """Serves a standing stream; one that ends before its first request has nothing to answer."""
        first = await anext(aiter(requests), None)
        if first is not None:
            async for response in session(self._front, first).run(requests):
                yield response

    async def Fetch(self, request: pb.FetchRequest, _context: Any) -> AsyncIterator[pb.FetchResponse]:
        """See buffer.proto."""
        async for response in fetch_stream(self._front, request):
            yield response

    @_for_learner
    async def Claim(self, request: pb.ClaimRequest, _context: Any) -> pb.ClaimResponse:
        """See buffer.proto."""
        if not request.leases:
            raise PayloadError("leases", "a claim names at least one group")
        claimed, refused, wanted = await self._front.store.claim(
            self._front.checked_table(request.table), request.incarnation,
            checked_version("train_version", request.train_version), _checked_leases(request.leases),
        )  # fmt: skip
        refusals = [pb.Refusal(group_id=group_id, reason=why, lease_id=lease) for (group_id, lease), why in refused]
        return pb.ClaimResponse(claimed=claimed, refused=refusals, checkpoint_wanted=wanted)

    @_for_learner
    async def Commit(self, request: pb.CommitRequest, _context: Any) -> pb.CommitResponse:
        """See buffer.proto."""
        trained = await self._front.store.commit(
            self._front.checked_table(request.table), request.incarnation,
            checked_version("version", request.version), request.checkpoint,
        )  # fmt: skip
        return pb.CommitResponse(trained=trained)

    @_for_learner
    async def Resume(self, request: pb.ResumeRequest, _context: Any) -> pb.ResumeResponse:
        """See buffer.proto."""
        table = self._front.checked_table(request.table)
        check_id("member_id", request.member_id)
        answer = await self._front.store.resume(
            table,
            request.member_id,
            checked_version("resume_version", request.resume_version),
            takeover=request.takeover,
            force=request.force,
            lease_ms=self._front.membership.member_ttl_ms,
            call=checked_number("call", request.call, least=1),
        )
        if answer[0] == b"suspect":
            raise lost_state_error()
        if answer[0] == b"outdated":
            raise TakeoverRefusedError(
                f"learner {request.member_id} has made a later attempt to take the run over",
                hint="this call came late; nothing was changed",
            )
        if answer[0] == b"held":
            raise TakeoverRefusedError(
                f"learner {answer[2].decode()} holds the run for {answer[3] / 1000:.1f} s more",
                hint="stop it first, or take over with --takeover",
            )
        if answer[0] == b"below_commit":
            # As damaged as a checkpoint that is missing: no restart mends it.
            raise DataError(
                f"version {request.resume_version} is below the last commit, {answer[2]}",
                hint="restore the checkpoint of that version; or name an older one with --from-checkpoint: the steps "
                "since are undone, and their groups stay trained",
            )
        await self._front.store.refresh(EVAL)
        incarnation, trained, returned, evicted, seeded = answer[2:7]
        return pb.ResumeResponse(
            incarnation=incarnation, trained=trained, returned=returned, evicted_stale=evicted, seeded=seeded
        )

    @_for_learner
    async def Reassert(self, request: pb.ReassertRequest, _context: Any) -> pb.ReassertResponse:
        """See buffer.proto."""
        table, store = self._front.checked_table(request.table), self._front.store
        check_id("member_id", request.member_id)
        check_reassertion(request)
        takeovers = {takeover.incarnation: takeover.resumed_at for takeover in request.takeovers}
        if request.incarnation not in takeovers:
            raise PayloadError("takeovers", f"incarnation {request.incarnation}, the caller's own, is missing")
        corrected, unknown, doubt = await store.reassert(
            table,
            request.incarnation,
            request.member_id,
            request.version,
            lease_ms=self._front.membership.member_ttl_ms,
            more=request.more,
            takeovers=sorted(takeovers.items()),
            uses=[(use.group_id, use.train_version, use.ordinal) for use in request.uses],
            doubt=request.doubt,
        )
        if request.doubt and not request.more:
            await store.commit(table, request.incarnation, request.committed, request.checkpoint)
            await store.refresh(EVAL)
        return pb.ReassertResponse(corrected=corrected, unknown=unknown, doubt=doubt)

    @_for_learner
    async def Nack(self, request: pb.NackRequest, _context: Any) -> pb.NackResponse:
        """See buffer.proto."""
        if request.disposition not in _DISPOSITIONS:
            raise PayloadError("disposition", "expected release, filter or fail")
        changed = await self._front.store.nack(
            self._front.checked_table(request.table), request.incarnation, _checked_leases(request.leases),
            _DISPOSITIONS[request.disposition], bounded(request.reason, REASON_CHARACTERS) or "unspecified",
        )  # fmt: skip
        return pb.NackResponse(changed=changed)

    async def Release(self, request: pb.ReleaseRequest, _context: Any) -> pb.ReleaseResponse:
        """See buffer.proto."""
        released = await self._front.store.release(
            self._front.checked_table(request.table),
            request.member_id,
            request.generation,
            _checked_leases(request.leases),
        )
        return pb.ReleaseResponse(released=released)

    @_for_learner
    async def SetPriorities(self, request: pb.SetPrioritiesRequest, _context: Any) -> pb.SetPrioritiesResponse:
        """See buffer.proto."""
        front = self._front
        for index, item in enumerate(request.priorities):
            check_group_id(f"priorities[{index}].group_id", item.group_id)
            if not (math.isfinite(item.priority) and item.priority > 0):
                raise PayloadError(f"priorities[{index}].priority", f"must be positive and finite, got {item.priority}")
        weighted = [
            (item.group_id, item.priority, weight_of(item.priority, front.draws.priority_exponent))
            for item in request.priorities
        ]
        table, call = front.checked_table(request.table), checked_number("call", request.call, least=1)
        return pb.SetPrioritiesResponse(
            changed=await front.store.set_priorities(table, request.incarnation, call, weighted) if weighted else 0
        )

    @_for_learner
    async def SetPolicyVersion(self, request: pb.SetPolicyVersionRequest, _context: Any) -> pb.SetPolicyVersionResponse:
        """See buffer.proto."""
        if request.incarnation == 0:
            raise FencedError("incarnation 0 names no learner", hint="call Resume first")
        checked_version("version", request.version)
        version = await self._front.store.set_policy(request.incarnation, request.version)
        return pb.SetPolicyVersionResponse(version=version)

    async def Redrive(self, request: pb.RedriveRequest, _context: Any) -> pb.RedriveResponse:
        """See buffer.proto."""
        table = self._front.checked_table(request.table)
        for index, group_id in enumerate(request.group_ids):
            check_group_id(f"group_ids[{index}]", group_id)
        return await redrive(self._front.store, table, request.group_ids)

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:
        """See buffer.proto."""
        table = self._front.checked_table(request.table)
        return await within_deadline(describe(self._front, table, now_s=time.time()), context)

    async def Holders(self, request: pb.HoldersRequest, context: Any) -> pb.HoldersResponse:
        """See buffer.proto."""
        table = self._front.checked_table(request.table)
        return await within_deadline(list_holders(self._front, table, request.limit), context)

    async def Ledger(self, request: pb.LedgerRequest, context: Any) -> pb.LedgerResponse:
        """See buffer.proto."""
        table = self._front.checked_table(request.table)
        return await within_deadline(ledger(self._front, table, request.failed_limit), context)
