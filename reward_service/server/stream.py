"""One ScoreStream call: items as they come, results as they are there.

Invariants
  * Each item gets one result: its score, the error `cancelled`, or an error when its time is over.
  * Items that are in progress or not written yet are bounded: beyond that the caller is not read, and has to wait.
  * No item waits for another, except that a group is scored together where functions see groups.
  * The call ends once the caller has closed its side and everything is answered. Where the caller has gone, nothing of
    it is left running.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from rollmesh.mesh.errors import PayloadError
from rollmesh.mesh.runtime.background_tasks import BackgroundTasks
from rollmesh.protos import reward_pb2
from rollmesh.reward_service.outcomes import Failed, not_begun, to_proto
from rollmesh.reward_service.scoring.engine import ScoringEngine

log = logging.getLogger(__name__)
MOST_OPEN = 1024
"""Items of one stream without a written result."""
# Bytes of them; one item may be more than that.
_MOST_BYTES = 64 << 20
# Seconds that items wait for others of their group where nothing depends on these: one call of the engine costs less.
_GATHER_S = 0.002


@dataclass(slots=True, eq=False)
class _Batch:
    """Items of one group that are scored together.

    Attributes:
        items: in order.
        deadline: monotonic time by which they are answered.
        open: item_ids without a result.
        began_ns: Unix time of the first one's arrival.
    """

    deadline: float
    items: list[reward_pb2.ScoreItem] = field(default_factory=list)
    open: set[str] = field(default_factory=set)
    began_ns: int = field(default_factory=time.time_ns)
    task: asyncio.Task[Any] | None = None


class ScoreStream:
    """A stream in progress.

    Args:
        engine: scores.
        budget: from the milliseconds that an item names (0: none) to the seconds that it gets.
        on_result: hears of each item, its result, and the Unix time in nanoseconds at which it came.
        on_open: hears by how much the number of open items changes.
    """

    def __init__(
        self,
        engine: ScoringEngine,
        budget: Callable[[int], float],
        on_result: Callable[[reward_pb2.ScoreItem, reward_pb2.ScoreResult, int], None],
        on_open: Callable[[int], None],
    ) -> None:
        self._engine = engine
        self._budget = budget
        self._on_result = on_result
        self._on_open = on_open
        self._whole_groups = engine.needs.needs_group
        self._open: dict[str, _Batch] = {}
        self._gathering: _Batch | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tasks = BackgroundTasks(lambda _name, error: self._answers.put_nowait(error))
        self._answers: asyncio.Queue[reward_pb2.ScoreResult | BaseException | None] = asyncio.Queue()
        self._room = asyncio.Event()
        self._unwritten = 0
        self._bytes = 0
        self._read_all = False

    async def results(
        self, requests: AsyncIterator[reward_pb2.ScoreStreamRequest]
    ) -> AsyncIterator[reward_pb2.ScoreResult]:
        """Results, in the order in which they are found.

        Raises:
            PayloadError: a request without content, or an item_id that is in progress.
        """
        self._tasks.spawn(self._read(requests), "reading a score stream")
        try:
            while (answer := await self._answers.get()) is not None:
                if isinstance(answer, BaseException):
                    raise answer
                yield answer
                self._unwritten -= 1
                self._room.set()
        finally:
            self.stop()

    def stop(self) -> None:
        """Ends all that is in progress."""
        if self._timer is not None:
            self._timer.cancel()
        self._tasks.cancel()
        self._on_open(-len(self._open))
        self._open.clear()

    # ------------------------------------------------------------------------------------------ requests

    async def _read(self, requests: AsyncIterator[reward_pb2.ScoreStreamRequest]) -> None:
        async for request in requests:
            kind = request.WhichOneof("request")
            if kind == "item":
                self._accept(request.item, self._budget(request.timeout_ms))
            elif kind == "cancel":
                self._cancel(request.cancel)
            else:
                raise PayloadError("request", "neither an item nor a cancellation")
            await self._wait_for_room()
        self._begin()
        self._read_all = True
        self._end_when_done()

    def _accept(self, item: reward_pb2.ScoreItem, seconds: float) -> None:
        if item.item_id in self._open:
            raise PayloadError("item.item_id", f"{item.item_id!r} is in progress on this stream")
        batch, deadline = self._gathering, time.monotonic() + seconds
        if batch is not None and batch.items[0].group_id != item.group_id:
            self._begin()
            batch = None
        if batch is None:
            batch = self._gathering = _Batch(deadline)
            loop = asyncio.get_running_loop()
            if self._whole_groups:
                self._timer = loop.call_later(seconds, self._give_up_group)
            else:
                self._timer = loop.call_later(_GATHER_S, self._begin)
        batch.deadline = min(batch.deadline, deadline)
        batch.items.append(item)
        batch.open.add(item.item_id)
        self._open[item.item_id] = batch
        self._bytes += item.ByteSize()
        self._on_open(1)

    async def _wait_for_room(self) -> None:
        while len(self._open) + self._unwritten >= MOST_OPEN or self._bytes > _MOST_BYTES:
            # Its end would not be read.
            self._begin()
            self._room.clear()
            await self._room.wait()

    def _cancel(self, item_id: str) -> None:
        batch = self._open.get(item_id)
        if batch is None:
            return
        place = next(place for place, item in enumerate(batch.items) if item.item_id == item_id)
        self._answer(batch, place, to_proto(item_id, Failed("cancelled", "the caller wants no result any more")))
        if batch is self._gathering:
            self._forget(batch, place)
        if not batch.open and batch.task is not None:
            batch.task.cancel()

    def _forget(self, batch: _Batch, place: int) -> None:
        """Drops a cancelled item of the batch that is being gathered: a group may be gathered for long."""
        del batch.items[place]
        if not batch.items:
            self._gathering = None
            if self._timer is not None:
                self._timer.cancel()

    # ------------------------------------------------------------------------------------------ batches

    def _begin(self) -> None:
        """Begins the batch that was being gathered."""
        batch, self._gathering = self._gathering, None
        if self._timer is not None:
            self._timer.cancel()
        if batch is not None and batch.open:
            batch.items = [item for item in batch.items if item.item_id in batch.open]
            batch.task = self._tasks.spawn(self._score(batch), "scoring a part of a stream")

    def _give_up_group(self) -> None:
        """Answers the items of a group that does not end in their time."""
        batch, self._gathering = self._gathering, None
        if batch is not None:
            self._answer_rest(
                batch, not_begun("their group has not ended: another group, or the stream's end, ends it")
            )

    async def _score(self, batch: _Batch) -> None:
        seconds = max(0.0, batch.deadline - time.monotonic())
        try:
            await self._engine.score_each(
                batch.items, seconds, lambda place, result: self._answer(batch, place, result)
            )
        except Exception as error:  # one batch must not end the others
            log.exception("a batch of a stream failed")
            self._answer_rest(batch, Failed("internal", f"{type(error).__name__}: {error}", retryable=True))

    def _answer_rest(self, batch: _Batch, failed: Failed) -> None:
        for place, item in enumerate(batch.items):
            self._answer(batch, place, to_proto(item.item_id, failed))

    def _answer(self, batch: _Batch, place: int, result: reward_pb2.ScoreResult) -> None:
        """Queues an item's result; a second one is dropped."""
        if result.item_id not in batch.open or result.item_id not in self._open:
            return
        batch.open.remove(result.item_id)
        del self._open[result.item_id]
        self._bytes -= batch.items[place].ByteSize()
        self._room.set()
        self._on_open(-1)
        self._unwritten += 1
        self._answers.put_nowait(result)
        self._on_result(batch.items[place], result, batch.began_ns)
        self._end_when_done()

    def _end_when_done(self) -> None:
        if self._read_all and not self._open:
            self._answers.put_nowait(None)
