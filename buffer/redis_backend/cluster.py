"""Redis Cluster with the interface of one connection: commands go to the nodes that hold their keys.

Invariants
  * Metadata of a run lies in one slot (`buffer.store.keys`), so a script runs on one node, the slot's *home*. Commands
    without a key (TIME, SCRIPT LOAD ...) go there too. Payloads and prompts lie anywhere.
  * The second batch of `send_then` is sent after every command of the first has been acknowledged by its node. So a
    member never counts before its payload is stored. If one of the first was refused, the second is not sent.
  * Redirections are followed a bounded number of times: MOVED corrects the map of slots, ASK holds for one command.
    A script is never sent after an ASK: on a slot that is half moved it would see half of the metadata. `GUARD` makes
    it fail there before its first write, so while the home slot moves scripts are refused, and clients repeat them.
  * Connections are kept to nodes of the map alone, and to those of the address.
  * A node that is gone, a slot without a node, or a map that never settles is an error of the whole batch. The next
    batch reads the map again. Nothing is repeated by itself after it may have been executed.

Limits of a failover: Redis Cluster replicates after it has answered. A write that was acknowledged by a primary, and
had not reached its replica when the primary failed for good, is lost. This is outside the promise that acknowledged
writes survive; a primary that comes back with its append-only file is within it. In both cases the run's home is
another process than before, so the learner reports its uses again before anything is handed out.
"""

from __future__ import annotations

import asyncio
import binascii
from collections.abc import Iterable, Sequence
from typing import Any

import hiredis

from rollmesh.buffer.redis_backend.connection import Argument, RedisConnection
from rollmesh.mesh.config.redis_url import RedisAddress

SLOTS = 1 << 14
# Fails, before anything else happens, where keys of the slot may lie on another node already.
GUARD = "redis.call('EXISTS', KEYS[1] .. ':none')\n"
_ROUNDS = 6
_KEYLESS = frozenset({"INFO", "PING", "SCRIPT", "TIME"})
# Commands of many keys, and what each of their keys becomes; answers are put together again.
_SPLIT = {"MGET": "GET", "UNLINK": "UNLINK"}
Node = tuple[str, int]
Command = Sequence[Argument]


def slot_of(key: Argument) -> int:
    """The slot of a key: that of the text between its first braces, if there is any."""
    name = key if isinstance(key, bytes) else str(key).encode()
    start = name.find(b"{")
    if start >= 0:
        end = name.find(b"}", start)
        if end > start + 1:
            name = name[start + 1 : end]
    return binascii.crc_hqx(name, 0) % SLOTS


class _Part:
    """A command for one slot, and its answer. `ask` is the node that must be asked just this once."""

    __slots__ = ("ask", "command", "reply", "slot")

    def __init__(self, command: Command, slot: int) -> None:
        self.command = command
        self.slot = slot
        self.ask: Node | None = None
        self.reply: Any = None


class ClusterConnection:
    """Sends batches to a Redis Cluster, over one connection to each primary.

    Args:
        address: nodes to ask for the map of slots, login and TLS.
        home_key: a key in the slot of the run's metadata.
        timeout_s: as of a `RedisConnection`.
    """

    def __init__(self, address: RedisAddress, home_key: str, timeout_s: float) -> None:
        self._address = address
        self._home = slot_of(home_key)
        self._timeout_s = timeout_s
        self._owners: list[Node | None] = [None] * SLOTS
        self._connections: dict[Node, RedisConnection] = {}
        self._stale = True
        self._reading = asyncio.Lock()

    async def send(self, commands: Sequence[Command]) -> list[Any]:
        """Replies to a batch, in its order; errors of single commands are values in their places.

        Commands of one key run in their order; others run side by side.

        Raises:
            OSError: a node could not be reached, or its connection broke. Other nodes may have done their part.
        """
        plan = [self._parts(command) for command in commands]
        waiting = [part for parts in plan for part in parts]
        for _ in range(_ROUNDS):
            if not waiting:
                break
            await self._refresh()
            waiting = await self._round(waiting)
        return [_joined(command, parts) for command, parts in zip(commands, plan, strict=True)]

    async def send_then(self, first: Sequence[Command], then: Sequence[Command]) -> list[Any]:
        """Replies to two batches, of which the second is sent once all of the first is acknowledged.

        Where one of the first is refused its error stands for the whole second batch, which is not sent.
        """
        replies = await self.send(first)
        refused = next((reply for reply in replies if isinstance(reply, hiredis.ReplyError)), None)
        return [*replies, *(await self.send(then) if refused is None else [refused] * len(then))]

    async def primaries(self) -> Sequence[RedisConnection]:
        """All nodes that hold keys."""
        await self._refresh()
        return [self._connection(node) for node in dict.fromkeys(self._owners) if node is not None]

    async def home(self) -> RedisAddress:
        """The server with the run's metadata."""
        await self._refresh()
        node = self._owners[self._home]
        if node is None:
            self._stale = True
            raise ConnectionError("no node of the cluster serves the slot of the run's metadata")
        return self._connection(node).address

    def close(self) -> None:
        """Drops all connections."""
        for wire in self._connections.values():
            wire.close()

    def _parts(self, command: Command) -> list[_Part]:
        name = str(command[0])
        if name in _SPLIT:
            return [_Part((_SPLIT[name], key), slot_of(key)) for key in command[1:]]
        if name in _KEYLESS:
            return [_Part(command, self._home)]
        return [_Part(command, slot_of(command[3 if name == "EVALSHA" else 1]))]

    def _connection(self, node: Node) -> RedisConnection:
        if node not in self._connections:
            self._connections[node] = RedisConnection(self._address.at(*node), self._timeout_s)
        return self._connections[node]

    async def _round(self, parts: Sequence[_Part]) -> list[_Part]:
        """Sends each part to its node; returns those that were sent on to another one."""
        by_node: dict[Node, list[_Part]] = {}
        for part in parts:
            node = part.ask or self._owners[part.slot]
            if node is None:
                self._stale = True
                raise ConnectionError(f"no node of the cluster serves slot {part.slot}")
            by_node.setdefault(node, []).append(part)
        # All are waited for, so that nothing of this batch is still in progress when its caller continues.
        outcomes = await asyncio.gather(*(self._ask(*item) for item in by_node.items()), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                self._stale = True
                raise outcome
        moved = [(part, *found) for part in parts if (found := self._redirection(part)) is not None]
        if any(kind == "MOVED" for _, kind, _ in moved):
            self._stale = True
            await self._refresh()
        for part, kind, node in moved:
            # A node's answer about itself is newer than a map that another one may have given.
            if kind == "MOVED":
                self._owners[part.slot] = node
            part.ask = node if kind == "ASK" else None
        return [part for part, _, _ in moved]

    async def _ask(self, node: Node, parts: Sequence[_Part]) -> None:
        commands: list[Command] = []
        for part in parts:
            commands += [("ASKING",), part.command] if part.ask else [part.command]
        replies = iter(await self._connection(node).send(commands))
        for part in parts:
            if part.ask:
                next(replies)
            part.reply = next(replies)
            if isinstance(part.reply, hiredis.ReplyError) and str(part.reply).startswith(("MOVED ", "ASK ")):
                # An empty host means the one that answers.
                kind, slot, target = str(part.reply).split(" ")
                host, _, port = target.rpartition(":")
                part.reply = hiredis.ReplyError(f"{kind} {slot} {host or node[0]}:{port}")

    def _redirection(self, part: _Part) -> tuple[str, Node] | None:
        """(MOVED or ASK, node) where the part must be sent again."""
        text = str(part.reply) if isinstance(part.reply, hiredis.ReplyError) else ""
        if text.startswith("CLUSTERDOWN"):
            self._stale = True
        kind, _, rest = text.partition(" ")
        if kind not in ("MOVED", "ASK") or (kind == "ASK" and part.command[0] == "EVALSHA"):
            return None
        host, _, port = rest.partition(" ")[2].rpartition(":")
        return kind, (host, int(port))

    async def _refresh(self) -> None:
        """Reads the map of slots where it may be wrong: from whichever node answers first."""
        if not self._stale:
            return
        async with self._reading:
            if not self._stale:
                return
            nodes = dict.fromkeys((*self._connections, *self._address.hosts))
            tasks = {asyncio.create_task(self._read_map(node)) for node in nodes}
            problem: Exception | None = None
            try:
                for finished in asyncio.as_completed(tasks):
                    try:
                        self._owners = await finished
                        self._stale = False
                        self._forget_others()
                        return
                    except OSError as error:
                        problem = problem or error
                raise ConnectionError(f"no node of {self._address} answers: {problem}") from problem
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _forget_others(self) -> None:
        """Closes connections to nodes that hold nothing any more; those in use are left for the next map."""
        held = {*self._owners, *self._address.hosts}
        for node, wire in list(self._connections.items()):
            if node not in held and wire.idle:
                self._connections.pop(node).close()

    async def _read_map(self, node: Node) -> list[Node | None]:
        (reply,) = await self._connection(node).send([("CLUSTER", "SLOTS")])
        if isinstance(reply, hiredis.ReplyError):
            raise reply
        owners: list[Node | None] = [None] * SLOTS
        for first, last, (host, port, *_), *_ in reply:
            owner = (host.decode() if host else node[0], int(port))
            owners[first : last + 1] = [owner] * (last + 1 - first)
        return owners


def _joined(command: Command, parts: Sequence[_Part]) -> Any:
    """The answer to a command that may have been split."""
    name = str(command[0])
    if name not in _SPLIT:
        return parts[0].reply
    replies = [part.reply for part in parts]
    refused: Iterable[Any] = (reply for reply in replies if isinstance(reply, hiredis.ReplyError))
    first = next(iter(refused), None)
    return first if first is not None else (sum(replies) if name == "UNLINK" else replies)
