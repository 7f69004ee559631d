"""A generator's end of the Write stream: many concurrent writes, few messages, each answered once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import grpc

from rollmesh.buffer.client.pending_write import PendingWrite
from rollmesh.buffer.client.reconnecting_stream import ReconnectingStream
from rollmesh.buffer.client.upload import Uploader
from rollmesh.buffer.protocol.framing import repeated_field
from rollmesh.buffer.protocol.limits import MAX_WHOLE_BYTES, MESSAGE_MEMBERS, PIECE_BYTES
from rollmesh.buffer.protocol.payload_framing import join_message
from rollmesh.mesh.errors import PayloadError, RollmeshError
from rollmesh.protos import buffer_pb2 as pb

# Bytes of one message. Larger ones cost a little less, but then writer, front and Redis work in turns. A generator's
# whole window of short members fits into a megabyte, and would be one message.
_MESSAGE_BYTES = 1 << 20
_METHOD = "/rollmesh.v1.Buffer/Write"
_WRITES, _PAYLOADS = (pb.WriteRequest.DESCRIPTOR.fields_by_name[name].number for name in ("writes", "payloads"))
# Messages sent and not answered yet; more are gathered meanwhile.
_IN_FLIGHT = 4


class WriteResult(NamedTuple):
    """Outcome of a write: `sealed` if the member was its group's last; `field` and `message` if it is rejected."""

    status: int
    sealed: bool = False
    field: str = ""
    message: str = ""


@dataclass(slots=True)
class _Call:
    """A `write` of the caller: its results by position, and how many are outstanding."""

    results: list[WriteResult | None]
    future: asyncio.Future[list[WriteResult]]
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = len(self.results)

    def put(self, position: int, result: WriteResult) -> None:
        self.results[position] = result
        self.left -= 1
        if self.left == 0 and not self.future.done():
            self.future.set_result([r for r in self.results if r is not None])


@dataclass(slots=True)
class _QueuedMember:
    """A member, serialized once: it is spliced into the messages that carry it."""

    head: bytes
    payload: bytes
    call: _Call
    position: int


def _is_large(write: PendingWrite) -> bool:
    return len(write.payload) > PIECE_BYTES and (not write.head.draft or len(write.payload) > MAX_WHOLE_BYTES)


def _rejected(error: PayloadError) -> WriteResult:
    """The buffer's answer to a write that cannot be sent."""
    return WriteResult(pb.WRITE_STATUS_REJECTED, field=error.field, message=error.message)


class WriteStream(ReconnectingStream):
    """A stream of writes: `write` returns once Redis has the members on disk.

    Unanswered messages are sent again after a reconnect, and to another connection where none is answered for
    `retry_s`. Members with a large payload are uploaded in pieces first, others do not wait for them; long drafts are
    refused.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        table: str,
        member_id: str,
        generation: Callable[[], int],
        retry_s: float,
        uploader: Uploader,
    ) -> None:
        self._call = channel.stream_stream(
            _METHOD, request_serializer=bytes, response_deserializer=pb.WriteResponse.FromString
        )
        self._table = table
        self._member_id = member_id
        self._generation = generation
        self._uploader = uploader
        self._answer_s = retry_s
        self._gathered: deque[_QueuedMember] = deque()
        self._unanswered: OrderedDict[int, list[_QueuedMember]] = OrderedDict()
        self._sequence = 0
        super().__init__(f"writing ({table})", retry_s)

    async def write(self, writes: Sequence[PendingWrite]) -> list[WriteResult]:
        """Stores members; results are in the order of `writes`.

        Raises:
            RollmeshError: the stream has ended for good (unreachable for `retry_s`, message too large).
        """
        large = {index for index, write in enumerate(writes) if _is_large(write)}
        return await (self._write_large(writes, large) if large else self._write(writes))

    async def _write_large(self, writes: Sequence[PendingWrite], large: set[int]) -> list[WriteResult]:
        async def upload(write: PendingWrite) -> list[WriteResult]:
            try:
                if write.head.draft:
                    raise PayloadError("payload", f"a draft of {len(write.payload)} bytes, over {MAX_WHOLE_BYTES}")
                return await self._write([await self._uploader.payload(self._table, write)])
            except PayloadError as error:
                return [_rejected(error)]

        others = self._write([write for index, write in enumerate(writes) if index not in large])
        results = await asyncio.gather(others, *(upload(writes[index]) for index in sorted(large)))
        small, uploaded = iter(results[0]), iter(results[1:])
        return [next(uploaded)[0] if index in large else next(small) for index in range(len(writes))]

    async def _write(self, writes: Sequence[PendingWrite]) -> list[WriteResult]:
        if self._error is not None:
            raise self._error
        if not writes:
            return []
        call = _Call([None] * len(writes), asyncio.get_running_loop().create_future())
        for position, write in enumerate(writes):
            write.head.payload_bytes = len(write.payload)
            self._gathered.append(_QueuedMember(write.head.SerializeToString(), write.payload, call, position))
        if len(self._gathered) == len(writes):
            # Writes of the same turn of the loop travel together.
            asyncio.get_running_loop().call_soon(self._flush)
        return await call.future

    def _flush(self) -> None:
        while self._gathered and len(self._unanswered) < _IN_FLIGHT and self._error is None:
            items: list[_QueuedMember] = []
            size = 0
            while self._gathered and size < _MESSAGE_BYTES and len(items) < MESSAGE_MEMBERS:
                item = self._gathered.popleft()
                items.append(item)
                size += len(item.head) + len(item.payload)
            self._sequence += 1
            if not self._unanswered:
                self._set_deadline(self._answer_s)
            self._unanswered[self._sequence] = items
            self._send(self._message(self._sequence, items))

    def _message(self, sequence: int, items: Sequence[_QueuedMember]) -> bytes:
        head = pb.WriteRequest(
            table=self._table, member_id=self._member_id, generation=self._generation(), sequence=sequence
        )
        rest = (head.SerializeToString(), *repeated_field(_WRITES, [item.head for item in items]))
        return join_message(_PAYLOADS, [item.payload for item in items], rest)

    def _start_call(self) -> Any:
        return self._call()

    def _replay_requests(self) -> list[bytes]:
        return [self._message(sequence, items) for sequence, items in self._unanswered.items()]

    def _on_response(self, response: pb.WriteResponse) -> None:
        items = self._unanswered.pop(response.sequence, [])
        more = {result.position: result for result in response.results}
        for position, (item, status) in enumerate(zip(items, response.statuses, strict=False)):
            if (detail := more.get(position)) is None:
                result = WriteResult(status)
            else:
                result = WriteResult(status, detail.sealed, detail.field, detail.message)
            item.call.put(item.position, result)
        self._set_deadline(self._answer_s if self._unanswered else None)
        self._flush()

    def _on_failure(self, error: RollmeshError) -> None:
        waiting = [item for items in self._unanswered.values() for item in items] + list(self._gathered)
        self._unanswered.clear()
        self._gathered.clear()
        for item in waiting:
            if not item.call.future.done():
                item.call.future.set_exception(error)
