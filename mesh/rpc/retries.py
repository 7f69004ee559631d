"""Bounds how long a peer that does not answer is tried again.

Invariants: the time since the first failure after an answer counts, so no caller gives up before a second try. Between
two failures at most half of the limit counts, so a process that was stopped itself tries again when it continues.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc
import tenacity

from rollmesh.mesh.errors import UnreachableError
from rollmesh.mesh.rpc.errors import is_transient, to_rollmesh_error

T = TypeVar("T")

# Seconds of failures after which they are logged a second time.
_SAY_AGAIN_S = 1.0


class Retries:
    """Tries of one peer.

    Args:
        retry_s: seconds of failures in a row after which the peer is given up.
        clock: monotonic seconds.
    """

    def __init__(self, retry_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._retry_s = retry_s
        self._clock = clock
        self._failed_at: float | None = None
        self._say_from_s = 0.0
        self.failing_s = 0.0
        """Seconds of the present failures."""

    def record_answer(self) -> None:
        """Records an answer of the peer."""
        self._failed_at, self.failing_s, self._say_from_s = None, 0.0, 0.0

    def record_failure(self) -> bool:
        """Records a failed try; returns whether it was the last."""
        now, before = self._clock(), self._failed_at
        self._failed_at = now
        if before is None:
            return False
        self.failing_s += min(now - before, self._retry_s / 2)
        return self.failing_s >= self._retry_s

    def should_log(self) -> bool:
        """True if this failure is to be logged: the first one is, then others at intervals that double."""
        if self.failing_s < self._say_from_s:
            return False
        self._say_from_s = max(_SAY_AGAIN_S, 2 * self.failing_s)
        return True


async def call_with_retry(call: Callable[[], Awaitable[T]], *, retry_s: float, what: str) -> T:
    """Repeats an idempotent call while its failures are transient.

    Args:
        call: makes one try; sets its own deadline.
        retry_s: seconds of failures in a row after which it gives up (`Retries`).
        what: names the call for errors and logs.

    Raises:
        RollmeshError: the typed error, or `UnreachableError` when the time is up.
    """
    retries = Retries(retry_s)
    retrying = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception(is_transient),
        stop=lambda _state: retries.record_failure(),
        wait=tenacity.wait_random_exponential(multiplier=0.05, max=1.0),
        reraise=True,
    )
    try:
        async for attempt in retrying:
            with attempt:
                return await call()
    except grpc.aio.AioRpcError as error:
        raise to_rollmesh_error(error, what) from error
    raise UnreachableError(f"{what}: no try was made")
