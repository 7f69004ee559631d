"""Keeps prompt tasks in the buffer, a bounded window ahead of the generators.

Invariants: the cursor is the buffer's `seeded` mark, so that a learner that takes over continues after it. After a loss
it returns to the buffer's last task; the buffer skips tasks that were used meanwhile. At most `window + batch` tasks
are pending. Prompts are tokenised in the order of their ordinals, window by window, off the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rollmesh.buffer.client.client import BufferClient
from rollmesh.learner.data.stream import PromptStream, TaskWindow
from rollmesh.learner.recovery.redis_recovery import RedisRecovery
from rollmesh.mesh.errors import RollmeshError, ended_by
from rollmesh.mesh.tables import TRAIN
from rollmesh.protos import buffer_pb2

log = logging.getLogger(__name__)
# Tasks per Seed call: bounds the size of the message.
_CHUNK = 256
# The window is checked this often even without a notification: failed groups use up tasks unseen.
_RECHECK_S = 1.0


@dataclass(frozen=True, slots=True)
class SeedingRules:
    """Bounds of the seeding.

    Attributes:
        incarnation: of this learner.
        batch: groups per optimizer batch.
        window: pending tasks to keep.
    """

    incarnation: int
    batch: int
    window: int


class PromptSeeder:
    """Seeds the table `train`.

    Args:
        client: of the buffer.
        prompts: the training prompts.
        recovery: replays what Redis has lost.
        rules: how far ahead.
        cursor: ordinal of the last task that was seeded.
        on_error: called with an error that ends the seeder early.
    """

    def __init__(
        self,
        client: BufferClient,
        prompts: PromptStream,
        recovery: RedisRecovery,
        rules: SeedingRules,
        *,
        cursor: int,
        on_error: Callable[[RollmeshError], None],
    ) -> None:
        self._client = client
        self._prompts = prompts
        self._recovery = recovery
        self._rules = rules
        self._cursor = cursor
        self._on_error = on_error
        self._pending = 0
        self._ended = False
        self._nudged = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def cursor(self) -> int:
        """Last ordinal seeded."""
        return self._cursor

    async def start(self) -> None:
        """Fills the window and keeps it filled in the background.

        Raises:
            DataError: no prompt can be used.
            RollmeshError: the buffer refuses.
        """
        await self._fill()
        self._task = asyncio.create_task(self._run(), name="seed")
        self._task.add_done_callback(self._on_task_done)

    def batch_used(self) -> None:
        """Refills the window after a claim: about a batch of tasks has left it."""
        self._pending = max(0, self._pending - self._rules.batch)
        self._nudged.set()

    def rewind(self, known: buffer_pb2.DescribeResponse) -> None:
        """Continues after the last task that a restarted Redis knows."""
        self._cursor = known.seeded
        self._pending = known.counts.pending
        self._ended = known.end_of_data
        self._nudged.set()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """Ends the run, which would stall without new tasks."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not isinstance(error, RollmeshError):
            log.error("seeding prompts failed", exc_info=error)
        self._on_error(ended_by(error, "seeding prompts"))

    async def _run(self) -> None:
        while True:
            try:
                await asyncio.wait_for(self._nudged.wait(), _RECHECK_S)
                self._nudged.clear()
            except TimeoutError:
                if self._ended:
                    continue
                self._pending = (await self._client.describe(TRAIN)).counts.pending
            await self._fill()

    async def _fill(self) -> None:
        while not self._ended and self._pending < self._rules.window:
            count = min(_CHUNK, self._rules.window - self._pending)
            cursor = self._cursor
            window = await asyncio.to_thread(self._prompts.after, cursor, count)
            await self._recovery.with_recovery(partial(self._seed, cursor, window))

    async def _seed(self, cursor: int, window: TaskWindow) -> None:
        """Seeds a window, unless the cursor has gone back meanwhile."""
        if cursor != self._cursor:
            return
        response = await self._client.seed(TRAIN, self._rules.incarnation, window.tasks, end_of_data=window.end)
        self._cursor = window.last_ordinal
        self._pending = response.pending
        if window.end:
            self._ended = True
            log.info("the data ends with ordinal %d", self._cursor)
