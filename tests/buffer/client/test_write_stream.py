"""A stream of writes expects answers only while it has something unanswered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from rollmesh.buffer.client.pending_write import PendingWrite
from rollmesh.buffer.client.write_stream import WriteStream
from rollmesh.protos import buffer_pb2 as pb

ANSWER_S = 30.0


class Call:
    """A call whose server answers when it is told to."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[pb.WriteRequest] = asyncio.Queue()
        self.responses: asyncio.Queue[pb.WriteResponse] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[pb.WriteResponse]:
        while True:
            yield await self.responses.get()

    async def write(self, request: bytes) -> None:
        """Keeps what is sent."""
        self.requests.put_nowait(pb.WriteRequest.FromString(request))

    def cancel(self) -> None:
        """Nothing runs."""


class Stream(WriteStream):
    """Notes within how many seconds it expects an answer; None: it expects none."""

    def __init__(self, call: Call) -> None:
        self.due: list[float | None] = []
        channel: Any = SimpleNamespace(stream_stream=lambda *args, **kwargs: lambda: call)
        uploader: Any = None
        super().__init__(channel, "train", "generator-1", lambda: 1, ANSWER_S, uploader)

    def _set_deadline(self, within_s: float | None) -> None:
        self.due.append(within_s)
        super()._set_deadline(within_s)


async def test_an_answer_is_expected_from_the_first_unanswered_message_on() -> None:
    call = Call()
    stream = Stream(call)
    try:
        written = asyncio.create_task(stream.write([PendingWrite(pb.MemberWrite(group_id="train-1"))]))
        request = await call.requests.get()
        assert stream.due == [ANSWER_S]
        response = pb.WriteResponse(sequence=request.sequence, statuses=[pb.WRITE_STATUS_STORED])
        call.responses.put_nowait(response)
        assert [result.status for result in await written] == [pb.WRITE_STATUS_STORED]
        assert stream.due[1] is None
    finally:
        await stream.close()
