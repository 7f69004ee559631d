"""Standing streams on the client side: one background task per stream that opens it again when it breaks.

Invariants
  * A stream that cannot be opened for `retry_s`, or has a failing task, ends with a typed error for all its users.
  * Requests that the server may not have received are sent again after a reconnect. Answers that come twice are
    recognized by their keys.
"""

from __future__ import annotations

import asyncio
import logging
import random
from abc import ABC, abstractmethod
from typing import Any

import grpc

from rollmesh.mesh.errors import LostStateError, OldGenerationError, RollmeshError, UnreachableError, ended_by
from rollmesh.mesh.rpc.errors import is_transient, to_rollmesh_error
from rollmesh.mesh.rpc.retries import Retries

log = logging.getLogger(__name__)
_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0


class ReconnectingStream(ABC):
    """A bidirectional stream that reconnects.

    Args:
        what: names it in errors and logs.
        retry_s: seconds of failures in a row after which it gives up.
    """

    def __init__(self, what: str, retry_s: float) -> None:
        self._what = what
        self._retries = Retries(retry_s)
        self._backoff_s = _BACKOFF_S
        self._outbox: asyncio.Queue[Any] = asyncio.Queue()
        self._error: RollmeshError | None = None
        # Seconds for which the server may send nothing, if that is known. A server that hangs still answers pings.
        self._patience_s: float | None = None
        self._patience: asyncio.Timeout | None = None
        self._task = asyncio.create_task(self._run(), name=what)
        self._task.add_done_callback(self._on_task_done)

    @abstractmethod
    def _start_call(self) -> Any:
        """Opens the call."""

    @abstractmethod
    def _replay_requests(self) -> list[Any]:
        """Requests to resend after a reconnect. Drops the requests that they replace."""

    @abstractmethod
    def _on_response(self, response: Any) -> None:
        """Handles one response."""

    @abstractmethod
    def _on_failure(self, error: RollmeshError) -> None:
        """Wakes all waiters with the error that has ended the stream."""

    async def _on_lost_state(self) -> None:
        """Redis may have lost state. The learner's stream restores it; others wait until it has."""
        log.info("%s: Redis was restarted; waits until the learner has reported which groups it has used", self._what)

    def _send(self, request: Any) -> None:
        if self._error is not None:
            raise self._error
        self._outbox.put_nowait(request)

    def _set_deadline(self, within_s: float | None) -> None:
        """Sets when the next response is due; None: none is."""
        self._patience_s = within_s
        if self._patience is not None and not self._patience.expired():
            now = asyncio.get_running_loop().time()
            self._patience.reschedule(None if within_s is None else now + within_s)

    async def close(self) -> None:
        """Ends the stream."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                how = await self._run_connection()
                error: RollmeshError = UnreachableError(f"{self._what}: the server {how}")
            except grpc.aio.AioRpcError as failure:
                error = to_rollmesh_error(failure, self._what)
                if not is_transient(failure) and not isinstance(error, OldGenerationError | LostStateError):
                    self._end(error)
                    return
            if isinstance(error, LostStateError):
                try:
                    await self._on_lost_state()
                except RollmeshError as failure:
                    self._end(failure)
                    return
            if self._retries.record_failure():
                self._end(error)
                return
            log.debug("%s: %s; opening it again", self._what, error)
            await asyncio.sleep(self._backoff_s * (0.5 + random.random()))  # noqa: S311  jitter
            self._backoff_s = min(_MAX_BACKOFF_S, self._backoff_s * 2)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """Ends the stream after an unexpected error in its task, so that all waiters receive the error."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("%s failed", self._what, exc_info=error)
        self._end(ended_by(error, self._what))

    def _end(self, error: RollmeshError) -> None:
        self._error = error
        self._on_failure(error)

    async def _run_connection(self) -> str:
        """Runs one connection until it ends; returns how the server has ended it.

        Raises:
            AioRpcError: the call failed.
        """
        call = self._start_call()
        self._outbox = asyncio.Queue()
        for request in self._replay_requests():
            self._outbox.put_nowait(request)
        outbox = self._outbox

        async def send() -> None:
            try:
                while True:
                    await call.write(await outbox.get())
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                # The reading side sees why the call ended.
                return

        sender = asyncio.create_task(send())
        patience = self._patience = asyncio.timeout(self._patience_s)
        try:
            async with patience:
                async for response in call:
                    self._retries.record_answer()
                    self._backoff_s = _BACKOFF_S
                    self._on_response(response)
                    self._set_deadline(self._patience_s)
            return "closed the stream"
        except TimeoutError:
            if not patience.expired():
                raise
            return f"has sent nothing for {self._patience_s:.1f} s"
        finally:
            self._patience = None
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)
            call.cancel()
