"""Scores in a Redis, for all services and runs that name it.

Invariants: an answer that does not come in time is no value, and never an error. While Redis does not answer it is
asked again after pauses only, so that few items wait for it. No caller waits for a write. The first question, and the
first after a pause, have time for a connection as well.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from rollmesh.mesh.config.redis_url import RedisAddress
from rollmesh.mesh.runtime.background_tasks import BackgroundTasks, log_errors

log = logging.getLogger(__name__)
_PREFIX = b"rollmesh:score:1:"
# Seconds for a connection, its login and the first answer.
_OPENING_S = 1.0
# Seconds without questions after a failure; the next pause is twice as long.
_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
# Writes under way; further ones are left out.
_MOST_WRITES = 64


class RedisStore:
    """Scores in one Redis.

    Args:
        address: of it.
        timeout_s: seconds that one question or write may take.
        ttl_s: seconds for which a value is kept.

    Attributes:
        failures: questions and writes that were not answered.

    Raises:
        ConfigError: its password cannot be read.
    """

    def __init__(self, address: RedisAddress, *, timeout_s: float, ttl_s: float) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._ttl_ms = max(1, round(1000 * ttl_s))
        self._client = Redis(
            **address.client_options(),
            socket_timeout=max(timeout_s, _OPENING_S),
            socket_connect_timeout=max(timeout_s, _OPENING_S),
            retry=Retry(NoBackoff(), 0),
            health_check_interval=0,
        )
        self._writes = BackgroundTasks(log_errors(log))
        self._pause_s = 0.0
        self._asks_from = 0.0
        self._has_answered = False
        self.failures = 0

    async def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of keys, None for each that is not there or not in time."""
        nothing: list[bytes | None] = [None] * len(keys)
        if time.monotonic() < self._asks_from:
            return nothing
        try:
            async with asyncio.timeout(self._patience_s):
                found = await self._client.mget([_PREFIX + key for key in keys])
        except (RedisError, OSError) as error:  # TimeoutError is an OSError
            self._pause(error)
            return nothing
        if not isinstance(found, list) or len(found) != len(keys):
            self._pause(RedisError("its answer has another form"))
            return nothing
        self._resume()
        return [value if isinstance(value, bytes) else None for value in found]

    def put(self, key: bytes, value: bytes) -> None:
        """Begins to keep a value; it is not kept where Redis has too much to do."""
        if len(self._writes) < _MOST_WRITES and time.monotonic() >= self._asks_from:
            self._writes.spawn(self._put(key, value), "a score for the cache in Redis")

    async def flush(self) -> None:
        """Waits until what was put has been written, or given up."""
        await self._writes.drain()

    async def close(self) -> None:
        """Ends what is under way, and the connections."""
        await self._writes.close()
        await self._client.aclose()

    async def _put(self, key: bytes, value: bytes) -> None:
        try:
            async with asyncio.timeout(self._patience_s):
                await self._client.set(_PREFIX + key, value, px=self._ttl_ms)
        except (RedisError, OSError) as error:
            self._pause(error)

    @property
    def _patience_s(self) -> float:
        """Seconds for the next question."""
        return self._timeout_s if self._has_answered else max(self._timeout_s, _OPENING_S)

    def _pause(self, error: Exception) -> None:
        """Asks no more for a while; several that fail together make one pause."""
        self.failures += 1
        now = time.monotonic()
        if now < self._asks_from:
            return
        if not self._pause_s:
            why = str(error) or f"no answer within {self._patience_s:g} s"
            log.warning("the cache of scores in Redis at %s is not used for now: %s", self._address, why)
        self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s or _PAUSE_S)
        self._asks_from = now + self._pause_s
        self._has_answered = False

    def _resume(self) -> None:
        if self._pause_s:
            log.info("the cache of scores in Redis at %s answers again", self._address)
        self._pause_s = 0.0
        self._has_answered = True
