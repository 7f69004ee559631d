"""Access to Redis, one server or a cluster: scripts by digest, batches of plain commands, typed errors.

Invariants
  * No command is repeated without the caller's knowledge: a lost answer must be visible, since the streams repair it.
  * Every refusal and failure of Redis becomes a `StoreError` with a hint.
  * Rights are checked before the first script: one that is refused a command halfway leaves half of its work.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import hiredis
import redis.asyncio
import redis.exceptions as rex
from redis.asyncio.client import PubSub
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from rollmesh.buffer.redis_backend.cluster import GUARD, ClusterConnection
from rollmesh.buffer.redis_backend.connection import Argument, RedisConnection, TlsError
from rollmesh.buffer.redis_backend.scripts import command_at, commands_of, load_scripts
from rollmesh.mesh.config.redis_url import RedisAddress, RedisOptions, parse_redis_url
from rollmesh.mesh.errors import StoreError

log = logging.getLogger(__name__)
# Pauses between looks at a Redis that is loading.
_FIRST_CHECK_S, _LONGEST_CHECK_S = 0.05, 1.0
_RIGHTS = 'docs/operations.md, "Redis", has the rights that a front needs'
# As Redis says it of a command, of a command inside a script (6.2), and of one there (7).
_DENIED = ("NOPERM", "executing the script can't", "ACL failure in script")


def store_error(error: Exception, command: str = "") -> StoreError:
    """Translates a failure of Redis for the reader; `command` is the one that was refused, if it is known."""
    text = str(error) or type(error).__name__
    if any(words in text for words in _DENIED):
        return StoreError(f"Redis does not let this user run {command or 'a command'}: {text}", hint=_RIGHTS)
    if "cluster support disabled" in text:
        return StoreError(f"Redis is no cluster: {text}", hint="use redis:// or rediss:// in buffer.redis")
    if text.startswith(("MOVED", "CROSSSLOT")):
        return StoreError(
            f"Redis is a cluster: {text}", hint="use redis-cluster:// or rediss-cluster:// in buffer.redis"
        )
    if text.startswith("ASK ") or "non local key" in text:
        return StoreError(f"the run's metadata is moving to another node: {text}", hint="clients repeat the call")
    if "CLUSTERDOWN" in text or "cluster is down" in text:
        return StoreError(f"the Redis cluster is down: {text}", hint="are all of its primaries running?")
    if isinstance(error, TlsError):
        return StoreError(
            f"TLS with Redis fails: {text}", hint="see buffer.redis_tls_ca, redis_tls_cert and redis_tls_key"
        )
    if isinstance(error, TimeoutError):
        return StoreError(
            f"Redis is too slow: {text}", hint="a slow disk or link? network.rpc_timeout_s is its deadline"
        )
    if isinstance(error, rex.OutOfMemoryError) or "OOM command" in text:
        return StoreError(f"Redis refuses writes: {text}", hint="raise its maxmemory, or lower buffer.max_bytes")
    if isinstance(error, rex.ReadOnlyError) or "READONLY" in text:
        return StoreError(f"Redis refuses writes: {text}", hint="buffer.redis points to a replica; give the primary")
    if "MISCONF" in text:
        return StoreError(f"Redis refuses writes: {text}", hint="it cannot persist; check its disk and its log")
    if isinstance(error, rex.AuthenticationError) or text.startswith(("NOAUTH", "WRONGPASS", "ERR AUTH")):
        return StoreError(
            f"Redis refuses this user: {text}",
            hint="the user goes into the URL buffer.redis, the password into buffer.redis_password_file",
        )
    if isinstance(error, rex.BusyLoadingError) or text.startswith("LOADING"):
        return LoadingError(f"Redis is loading its data: {text}", hint="it answers once that is done")
    if isinstance(error, PermissionError):
        return StoreError(
            f"Redis is closed to this user: {text}", hint="an embedded Redis serves only the user who runs it"
        )
    if isinstance(error, rex.ConnectionError | rex.TimeoutError | OSError):
        return StoreError(f"Redis is unreachable: {text}", hint="is it running? clients repeat the call")
    return StoreError(f"Redis failed: {text}", hint="see the log of Redis")


class LoadingError(StoreError):
    """Redis was started, and reads its data before it answers."""


class store_errors:  # noqa: N801  reads like the statement that it is
    """Turns failures of Redis into `StoreError`."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, (rex.RedisError, hiredis.HiredisError, OSError)):
            raise store_error(error) from error
        # uvloop's word for a connection that was reset a moment ago, which redis-py passes on.
        if isinstance(error, RuntimeError) and "the handler is closed" in str(error):
            raise store_error(ConnectionError("connection reset")) from error


class RedisAccess:
    """Redis as the store uses it.

    Args:
        url: as `mesh.config.redis_url` reads it.
        run_key: the run's hash (KEYS[1] of every script).
        timeout_s: deadline of one batch of commands, apart from the time that its bytes take.
        clock: Lua source that replaces Redis TIME (proofs by replay only).
        options: of Redis, in addition to the URL.

    Attributes:
        client: a redis-py client for tools and tests; connects when it is used.

    Raises:
        ConfigError: the URL cannot be, or a file that belongs to it cannot be read.
    """

    def __init__(
        self,
        url: str,
        run_key: str,
        *,
        timeout_s: float = 10.0,
        clock: str | None = None,
        options: RedisOptions | None = None,
    ) -> None:
        address = parse_redis_url(url, options)
        self._timeout_s = timeout_s
        self._run_key = run_key
        self._connection: RedisConnection | ClusterConnection
        if address.cluster:
            self._connection = ClusterConnection(address, run_key, timeout_s)
            self.client: Any = redis.asyncio.RedisCluster(**self._client_options(address))
        else:
            self._connection = RedisConnection(address, timeout_s)
            self.client = redis.asyncio.Redis(**self._client_options(address))
        self._scripts = load_scripts(clock, GUARD if address.cluster else "")

    def _client_options(self, address: RedisAddress) -> dict[str, Any]:
        return {
            **address.client_options(),
            "socket_timeout": self._timeout_s,
            "socket_connect_timeout": self._timeout_s,
            "retry": Retry(NoBackoff(), 0),
            "health_check_interval": 0,
        }

    async def batch(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        """Replies to commands sent together: one round trip, and one fsync of each Redis for all.

        In a cluster, commands on different keys run in no order. Where the order matters: `batch_then`.

        Raises:
            StoreError: the connection broke, or one of the commands failed.
        """
        return await self.batch_then((), commands)

    async def batch_then(self, first: Sequence[Sequence[Argument]], then: Sequence[Sequence[Argument]]) -> list[Any]:
        """Replies to two batches, of which the second runs after the first; on one server that is one round trip.

        In a cluster the second is not sent where one of the first was refused.

        Raises:
            StoreError: the connection broke, or one of the commands failed.
        """
        if not first and not then:
            return []
        with store_errors():
            replies = await (self._connection.send_then(first, then) if first else self._connection.send(then))
        self._check([*first, *then], replies)
        return replies

    def _check(self, commands: Sequence[Sequence[Argument]], replies: Sequence[Any]) -> None:
        if hiredis.ReplyError not in map(type, replies):
            return
        for command, reply in zip(commands, replies, strict=True):
            if isinstance(reply, hiredis.ReplyError):
                raise store_error(reply, self._name(command, str(reply))) from reply

    def _name(self, command: Sequence[Argument], text: str) -> str:
        """The command of an error: inside a script, the command of the failed line."""
        line = re.search(r"user_script:(\d+)", text)
        if command[0] != "EVALSHA" or line is None:
            return str(command[0])
        script = next(script for script in self._scripts.values() if script.digest == command[1])
        return f"{command_at(script, int(line[1])) or 'a command'} in {script.name}"

    async def load(self) -> None:
        """Loads every script."""
        await self.batch([("SCRIPT", "LOAD", script.source) for script in self._scripts.values()])

    async def wait_until_loaded(self, patience_s: float) -> None:
        """Waits while Redis loads its data, for instance after a restart.

        Raises:
            StoreError: it still loads after `patience_s`, or cannot be reached at all.
        """
        until = time.monotonic() + patience_s
        pause = _FIRST_CHECK_S
        while True:
            try:
                await self.batch([("EXISTS", self._run_key)])
            except LoadingError as error:
                if time.monotonic() + pause > until:
                    raise
                log.info("waits for Redis: %s", error.message)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_CHECK_S)
            else:
                return

    async def check_acl(self, payload_key: str) -> None:
        """Makes sure that our user may run all commands that scripts and payloads need.

        Args:
            payload_key: a payload's key that is not in use.

        Raises:
            StoreError: it may not; names the commands.
        """
        refused = await self.run_script("check_acl", *commands_of(self._scripts))
        if refused:
            names = ", ".join(name.decode() for name in refused)
            raise StoreError(f"Redis does not let this user run {names} in scripts", hint=_RIGHTS)
        stored = [("SET", payload_key, "", "NX", "EX", 60)]
        await self.batch_then(stored, [("MGET", payload_key), ("UNLINK", payload_key)])

    async def run_script(self, name: str, *arguments: Argument) -> list[Any]:
        """Runs a script and returns its answer."""
        return await self.run_after((), name, *arguments)

    async def run_after(self, commands: Sequence[Sequence[Argument]], name: str, *arguments: Argument) -> list[Any]:
        """Runs plain commands and after them one script; returns the script's answer.

        On one server they are sent together. In a cluster the script is sent once all nodes have acknowledged the plain
        commands. These must be repeatable: they are sent again if Redis had forgotten the script.
        """
        answer: list[Any] = (await self.run_all_after(commands, ((name, *arguments),)))[-1]
        return answer

    async def run_all_after(
        self, commands: Sequence[Sequence[Argument]], verbs: Sequence[Sequence[Argument]]
    ) -> list[Any]:
        """Runs plain commands and then several scripts (name and arguments), in order; returns the replies to all."""
        calls = [("EVALSHA", self._scripts[str(verb[0])].digest, 1, self._run_key, *verb[1:]) for verb in verbs]
        send = self._connection.send
        with store_errors():
            replies = await (self._connection.send_then(commands, calls) if commands else send(calls))
        first = replies[len(commands)]
        if isinstance(first, hiredis.ReplyError) and str(first).startswith("NOSCRIPT"):
            await self.load()
            with store_errors():
                replies = await (self._connection.send_then(commands, calls) if commands else send(calls))
        self._check([*commands, *calls], replies)
        return replies

    async def time_ms(self) -> int:
        """Redis' time in Unix milliseconds."""
        ((seconds, micros),) = await self.batch([("TIME",)])
        return int(seconds) * 1000 + int(micros) // 1000

    async def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        """Values of plain keys; None where one is missing."""
        if not keys:
            return []
        (values,) = await self.batch([("MGET", *keys)])
        found: list[bytes | None] = values
        return found

    async def scan(self, match: str, count: int = 1000) -> AsyncIterator[bytes]:
        """Keys that match a pattern, on all primaries; some twice, and none that was there all the time left out.

        A key may be left out if its slot moves to another node meanwhile: a later scan finds it.

        Args:
            match: pattern as of SCAN.
            count: keys scanned per call; Redis answers no other client meanwhile.
        """
        with store_errors():
            primaries = await self._connection.primaries()
        for wire in primaries:
            cursor = b"0"
            while True:
                with store_errors():
                    command = ("SCAN", cursor, "MATCH", match, "COUNT", count)
                    (reply,) = await wire.send([command])
                self._check([command], [reply])
                cursor, keys = reply
                for key in keys:
                    yield key
                if cursor == b"0":
                    break

    @asynccontextmanager
    async def subscribed(self, channel: str) -> AsyncIterator[PubSub]:
        """A subscription, on the server that holds the run's metadata.

        Raises:
            StoreError: it ended, or could not begin.
        """
        with store_errors():
            address = await self._connection.home()
            async with (
                aclosing(redis.asyncio.Redis(**self._client_options(address))) as client,
                aclosing(client.pubsub(ignore_subscribe_messages=True)) as subscription,
            ):
                await subscription.subscribe(channel)
                yield subscription

    async def close(self) -> None:
        """Drops all connections."""
        self._connection.close()
        await self.client.aclose()
