"""A judging model, as scorers ask it: texts of all callers go to one process.

Invariants
  * A text whose turn does not come in time is not begun; that is no failure.
  * A process that ends or hangs is replaced. Each text of its last batches is suspected then, and gets a pass of its
    own the next time. So a text that breaks the process fails alone.
  * Who ends a wait: the process answers; its end is seen at once; its silence is ended within the time of a call.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from rollmesh.mesh.errors import RewardError
from rollmesh.mesh.runtime.async_bridge import AsyncBridge
from rollmesh.mesh.wait import NO_WAIT, Wait
from rollmesh.reward_service.outcomes import Failed, not_begun
from rollmesh.reward_service.served_model.connection import ModelConnection
from rollmesh.reward_service.served_model.messages import ASK, AWAY, BEGUN, DONE, DROP, HEARD, ModelOptions, Text

log = logging.getLogger(__name__)
Answer = list[float] | Failed
# Shares of a call's time: a text has to be begun in the first; silence is ended after the second. Both are less than
# a call's time, so that no caller has given up before.
_BEGIN_SHARE, _SILENCE_SHARE = 0.5, 0.45
# Seconds between starts of a process that ends again and again: the first pause, and the longest.
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 30.0
# Most seconds between two looks at a process that says nothing.
_LOOK_S = 1.0
_MOST_SUSPECTS = 4096


@dataclass(slots=True, eq=False)
class _Job:
    text: Text
    digest: bytes
    answer: asyncio.Future[Answer]


class ServedModel:
    """A model in a process of its own.

    Args:
        name: of the scorer, for messages.
        options: of the model.
        call_timeout_s: seconds in which a call has to end.

    Attributes:
        restarts: processes that ended and were replaced.
    """

    def __init__(self, name: str, options: ModelOptions, *, call_timeout_s: float) -> None:
        self._name = name
        self._options = options
        self._call_timeout_s = call_timeout_s
        self._bridge: AsyncBridge | None = None
        self._connection: ModelConnection | None = None
        # Those whose callers wait, and the digests of all that the process has begun.
        self._jobs: dict[int, _Job] = {}
        self._begun: dict[int, bytes] = {}
        self._suspects: OrderedDict[bytes, None] = OrderedDict()
        self._count = 0
        self._keeper: asyncio.Task[None] | None = None
        self._trouble = ""
        # Since when the process owes a sign that it has heard, and the values of what it has begun.
        self._unheard_since: float | None = None
        self._computing_since: float | None = None
        # Digest of the text that it reads just now.
        self._reading = b""
        self.restarts = 0

    def present_wait(self) -> Wait:
        """The reason why texts wait; empty while the model answers."""
        return Wait(f"{self._name}: {self._trouble}") if self._trouble and self._jobs else NO_WAIT

    @property
    def pid(self) -> int | None:
        """Id of the present process; None: there is none."""
        return None if self._connection is None else self._connection.pid

    async def start(self) -> None:
        """Loads the model.

        Raises:
            RewardError: it cannot be loaded.
        """
        await asyncio.wrap_future(self._own_loop().submit(self._start()))

    async def ask(self, texts: Sequence[Text]) -> list[Answer]:
        """Values of texts, from any event loop; a failure for a text without values.

        A text is not begun if its turn does not come within half of a call's time.
        """
        return await asyncio.wrap_future(self._own_loop().submit(self._ask(texts)))

    async def close(self) -> None:
        """Ends the process."""
        if self._bridge is not None:
            bridge, self._bridge = self._bridge, None
            await asyncio.wrap_future(bridge.submit(self._close()))
            await asyncio.to_thread(bridge.close)

    def _own_loop(self) -> AsyncBridge:
        # A loop of its own: the process must outlive each loop that asks.
        if self._bridge is None:
            self._bridge = AsyncBridge(f"reward-{self._name}")
        return self._bridge

    # ------------------------------------------------------------------------------------------ on its own loop

    async def _start(self) -> None:
        if self._keeper is None:
            self._connection = await ModelConnection.open(self._options, self._on_message)
            self._keep()

    async def _close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait((self._keeper,))
        if self._connection is not None:
            await self._connection.end()
            self._connection = None
        for job in self._jobs.values():
            _resolve(job, Failed("closed", f"{self._name}: the service ends", retryable=True))

    def _keep(self) -> None:
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._kept())

    async def _ask(self, texts: Sequence[Text]) -> list[Answer]:
        self._keep()
        jobs: dict[int, _Job] = {}
        for text in texts:
            self._count += 1
            digest = hashlib.blake2b(msgpack.packb(text), digest_size=16).digest()
            jobs[self._count] = _Job(text, digest, asyncio.get_running_loop().create_future())
        self._jobs |= jobs
        self._send(jobs)
        answers = [job.answer for job in jobs.values()]
        try:
            await asyncio.wait(answers, timeout=_BEGIN_SHARE * self._call_timeout_s)
            for key, job in jobs.items():
                if key not in self._begun:
                    _resolve(job, not_begun(f"{self._name}: {self._trouble or 'the model works on others'}"))
            return await asyncio.gather(*answers)
        finally:
            for key in jobs:
                del self._jobs[key]
            self._drop([key for key, job in jobs.items() if key not in self._begun])

    def _send(self, jobs: dict[int, _Job]) -> None:
        if self._connection is not None and jobs:
            self._unheard_since = self._unheard_since or time.monotonic()
            self._connection.send(ASK, [[key, job.text, job.digest in self._suspects] for key, job in jobs.items()])

    def _drop(self, keys: Sequence[int]) -> None:
        if self._connection is not None and keys:
            self._connection.send(DROP, keys)

    def _on_message(self, message: list[Any]) -> None:
        kind, *arguments = message
        if kind == HEARD:
            job = self._jobs.get(arguments[0])
            self._reading = b"" if job is None else job.digest
            self._unheard_since = time.monotonic() if arguments[0] else None
            return
        if kind == AWAY:
            self._trouble = str(arguments[0])
            for key in arguments[1]:
                self._begun.pop(key, None)
        elif kind == BEGUN:
            # Also those whose callers have gone: they may hang as well.
            self._begun |= {key: job.digest if (job := self._jobs.get(key)) else b"" for key in arguments[0]}
        else:
            self._trouble = ""
            for key, *values in arguments[0]:
                self._suspects.pop(self._begun.pop(key, b""), None)
                if (job := self._jobs.get(key)) is not None:
                    _resolve(job, _answer(self._name, kind, values))
        self._computing_since = time.monotonic() if self._begun else None

    # ------------------------------------------------------------------------------------------ its process

    async def _kept(self) -> None:
        """Replaces each process that ends or hangs, until this task is cancelled."""
        pause_s = _PAUSE_S
        while True:
            began = time.monotonic()
            if self._connection is None:
                self._trouble = self._trouble or "its model is being loaded"
                try:
                    self._connection = await ModelConnection.open(self._options, self._on_message)
                except RewardError as error:
                    self._trouble = str(error)
                else:
                    self._trouble = ""
                    self._send({key: job for key, job in self._jobs.items() if not job.answer.done()})
            if self._connection is not None:
                why = await self._end_of(self._connection)
                connection, self._connection = self._connection, None
                code = await connection.end()
                self.restarts += 1
                self._trouble = f"its process is replaced: {why}, exit code {code}"
                self._after_end(why)
            log.error("%s: %s", self._name, self._trouble)
            pause_s = _PAUSE_S if time.monotonic() - began > _LONGEST_PAUSE_S else min(2 * pause_s, _LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s)

    async def _end_of(self, connection: ModelConnection) -> str:
        """Waits until a process ends or hangs; in words."""
        longest_s = _SILENCE_SHARE * self._call_timeout_s
        while True:
            try:
                async with asyncio.timeout(min(_LOOK_S, longest_s / 8)):
                    await connection.lost.wait()
                return "it ended"
            except TimeoutError:
                if self._is_overdue(self._unheard_since) or self._is_overdue(self._computing_since):
                    return f"no answer for {longest_s:.1f} s (see reward.scorer_timeout_s, max_tokens_per_batch)"

    def _after_end(self, why: str) -> None:
        """The texts that may have been the cause are suspected; one that was suspected before has failed."""
        begun, self._begun = self._begun, {}
        is_reading = self._is_overdue(self._unheard_since) or not begun
        causes = {self._reading} if is_reading else set(begun.values())
        causes.discard(b"")
        self._reading, self._unheard_since, self._computing_since = b"", None, None
        for key, job in self._jobs.items():
            if job.digest in causes & self._suspects.keys():
                _resolve(job, Failed("crashed", f"{self._name}: {why}, with this text alone", retryable=True))
            elif job.digest in causes or key in begun:
                _resolve(job, not_begun(f"{self._name}: {self._trouble}"))
        self._suspects |= dict.fromkeys(causes)
        while len(self._suspects) > _MOST_SUSPECTS:
            self._suspects.popitem(last=False)

    def _is_overdue(self, since: float | None) -> bool:
        return since is not None and time.monotonic() - since > _SILENCE_SHARE * self._call_timeout_s


def _answer(name: str, kind: str, values: Sequence[Any]) -> Answer:
    if kind == DONE:
        return [float(value) for value in values[0]]
    return Failed(str(values[0]), f"{name}: {values[1]}")


def _resolve(job: _Job, answer: Answer) -> None:
    if not job.answer.done():
        job.answer.set_result(answer)
