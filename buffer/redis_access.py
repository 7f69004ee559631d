"""Access to Redis: verbs by digest, batches of plain commands, typed errors.

Invariants: no command is repeated behind the caller's back (a lost answer must be visible: the streams repair it);
everything Redis can refuse or suffer becomes a `StoreError` with a hint.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import hiredis
import redis.asyncio
import redis.exceptions as rex
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from buffer.scripts import load_scripts
from buffer.wire import Argument, Wire
from mesh.errors import StoreError


def store_error(error: Exception) -> StoreError:
    """What a Redis failure means for the reader."""
    text = str(error) or type(error).__name__
    if isinstance(error, rex.OutOfMemoryError) or "OOM command" in text:
        return StoreError(f"Redis refuses writes: {text}", hint="raise its maxmemory, or lower buffer.max_bytes")
    if isinstance(error, rex.ReadOnlyError) or "READONLY" in text:
        return StoreError(f"Redis refuses writes: {text}", hint="buffer.redis points to a replica; give the primary")
    if "MISCONF" in text:
        return StoreError(f"Redis refuses writes: {text}", hint="it cannot persist; look at its disk and its log")
    if isinstance(error, rex.AuthenticationError) or text.startswith(("NOAUTH", "WRONGPASS", "ERR AUTH")):
        return StoreError(f"Redis refuses us: {text}", hint="put user and password into the URL buffer.redis")
    if isinstance(error, rex.BusyLoadingError) or text.startswith("LOADING"):
        return StoreError(f"Redis is loading its data: {text}", hint="it answers once that is done")
    if isinstance(error, rex.ConnectionError | rex.TimeoutError | OSError):
        return StoreError(f"Redis is unreachable: {text}", hint="is it running? clients repeat the call")
    return StoreError(f"Redis failed: {text}", hint="see the log of Redis")


@asynccontextmanager
async def translated() -> AsyncIterator[None]:
    """Turns failures of Redis into `StoreError`."""
    try:
        yield
    except (rex.RedisError, hiredis.HiredisError, OSError) as error:
        raise store_error(error) from error


class RedisAccess:
    """Redis as the store uses it.

    Args:
        url: redis://, rediss:// or unix:// URL.
        run_key: the run's hash (KEYS[1] of every verb).
        timeout_s: deadline of one batch of commands.
        clock: Lua source that replaces Redis TIME (proofs by replay only).

    Attributes:
        client: a redis-py client beside the hot path (subscriptions, views, upkeep).
    """

    def __init__(self, url: str, run_key: str, *, timeout_s: float = 10.0, clock: str | None = None) -> None:
        self.client = redis.asyncio.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            health_check_interval=0,
        )
        self._wire = Wire(url, timeout_s)
        self._run_key = run_key
        self._scripts = load_scripts(clock)

    async def batch(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        """Replies to commands sent together: one round trip, and one fsync of Redis for all.

        Raises:
            StoreError: the connection broke, or one of the commands failed.
        """
        if not commands:
            return []
        async with translated():
            replies = await self._wire.send(commands)
            for reply in replies:
                if isinstance(reply, hiredis.ReplyError):
                    raise reply
            return replies

    async def load(self) -> None:
        """Loads every verb."""
        await self.batch([("SCRIPT", "LOAD", script.source) for script in self._scripts.values()])

    async def verb(self, name: str, *arguments: Argument) -> list[Any]:
        """Runs a verb and returns its answer."""
        return await self.after((), name, *arguments)

    async def after(self, commands: Sequence[Sequence[Argument]], name: str, *arguments: Argument) -> list[Any]:
        """Sends plain commands and behind them one verb, together; returns the verb's answer.

        The plain commands must be repeatable: they are sent once more where Redis had forgotten the verb.
        """
        whole = [*commands, ("EVALSHA", self._scripts[name].digest, 1, self._run_key, *arguments)]
        async with translated():
            replies = await self._wire.send(whole)
        if isinstance(replies[-1], hiredis.ReplyError) and str(replies[-1]).startswith("NOSCRIPT"):
            await self.load()
            replies = await self.batch(whole)
        for reply in replies:
            if isinstance(reply, hiredis.ReplyError):
                raise store_error(reply)
        answer: list[Any] = replies[-1]
        return answer

    async def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        """Values of plain keys; None where one is missing."""
        if not keys:
            return []
        (values,) = await self.batch([("MGET", *keys)])
        found: list[bytes | None] = values
        return found

    async def close(self) -> None:
        """Drops all connections."""
        self._wire.close()
        await self.client.aclose()
