"""Access to Redis: one connection pool, verbs by digest, typed errors.

Invariants: no command is repeated behind the caller's back (a lost answer must be visible: the streams repair it);
everything Redis can refuse or suffer becomes a `StoreError` with a hint.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import redis.asyncio
import redis.exceptions as rex
from redis.asyncio.client import Pipeline
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from buffer.scripts import Script, load_scripts
from mesh.errors import StoreError

Argument = str | bytes | int


def store_error(error: Exception) -> StoreError:
    """What a Redis failure means for the reader."""
    text = str(error) or type(error).__name__
    if isinstance(error, rex.OutOfMemoryError) or "OOM command" in text:
        return StoreError(f"Redis refuses writes: {text}", hint="raise its maxmemory, or lower buffer.max_bytes")
    if isinstance(error, rex.ReadOnlyError) or "READONLY" in text:
        return StoreError(f"Redis refuses writes: {text}", hint="buffer.redis points to a replica; give the primary")
    if "MISCONF" in text:
        return StoreError(f"Redis refuses writes: {text}", hint="it cannot persist; look at its disk and its log")
    if isinstance(error, rex.AuthenticationError) or "NOAUTH" in text:
        return StoreError(f"Redis refuses us: {text}", hint="put user and password into the URL buffer.redis")
    if isinstance(error, rex.BusyLoadingError):
        return StoreError(f"Redis is loading its data: {text}", hint="it answers once that is done")
    if isinstance(error, rex.ConnectionError | rex.TimeoutError | OSError):
        return StoreError(f"Redis is unreachable: {text}", hint="is it running? clients repeat the call")
    return StoreError(f"Redis failed: {text}", hint="see the log of Redis")


@asynccontextmanager
async def translated() -> AsyncIterator[None]:
    """Turns failures of Redis into `StoreError`."""
    try:
        yield
    except (rex.RedisError, OSError) as error:
        raise store_error(error) from error


class RedisAccess:
    """A Redis client that knows the verbs.

    Args:
        url: redis://, rediss:// or unix:// URL.
        run_key: the run's hash (KEYS[1] of every verb).
        timeout_s: deadline of one command.
        clock: Lua source that replaces Redis TIME (proofs by replay only).
    """

    def __init__(self, url: str, run_key: str, *, timeout_s: float = 10.0, clock: str | None = None) -> None:
        self.client = redis.asyncio.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            health_check_interval=0,
        )
        self._run_key = run_key
        self._scripts = load_scripts(clock)

    async def load(self) -> None:
        """Loads every verb."""
        async with translated():
            pipeline = self.client.pipeline(transaction=False)
            for script in self._scripts.values():
                pipeline.execute_command("SCRIPT LOAD", script.source)
            await pipeline.execute()

    async def verb(self, name: str, *arguments: Argument) -> list[Any]:
        """Runs a verb and returns its answer."""
        script = self._scripts[name]
        async with translated():
            try:
                return await self._evalsha(script, arguments)
            except rex.NoScriptError:
                await self.load()
                return await self._evalsha(script, arguments)

    async def _evalsha(self, script: Script, arguments: Sequence[Argument]) -> list[Any]:
        answer: list[Any] = await self.client.execute_command("EVALSHA", script.digest, 1, self._run_key, *arguments)
        return answer

    async def pipelined(self, commands: Sequence[Sequence[Argument]], name: str, *arguments: Argument) -> list[Any]:
        """Sends plain commands and behind them one verb, in one round trip; returns the verb's answer.

        The plain commands must be repeatable. One message, hence one fsync of Redis for all of them.
        """
        script = self._scripts[name]
        async with translated():
            pipeline: Pipeline = self.client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            pipeline.execute_command("EVALSHA", script.digest, 1, self._run_key, *arguments)
            *plain, answer = await pipeline.execute(raise_on_error=False)
            for reply in plain:
                if isinstance(reply, Exception):
                    raise reply
            if isinstance(answer, rex.NoScriptError):
                return await self.verb(name, *arguments)
            if isinstance(answer, Exception):
                raise answer
            result: list[Any] = answer
            return result

    async def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        """Values of plain keys; None where one is missing."""
        if not keys:
            return []
        async with translated():
            values: list[Any] = await self.client.mget(keys)
        return values

    async def close(self) -> None:
        await self.client.aclose()
