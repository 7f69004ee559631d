"""A real Redis Cluster of local processes, and what operators do to one: kill a node, start it, move a slot."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import signal
import socket
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio

from rollmesh.buffer.redis_backend.cluster import SLOTS, slot_of
from rollmesh.buffer.redis_backend.embedded import find_redis_server
from rollmesh.mesh.runtime.die_with_parent import die_with_parent

# A test of the mesh that must pass on one Redis and on a cluster.
single_and_cluster = pytest.mark.parametrize("mesh", ["single", "cluster"], indirect=True)
_READY_S = 30.0
# A node hears the others on a second port, so far above its own.
_BUS = 10_000


class Node:
    """One redis-server of the cluster; its data survives its end."""

    def __init__(self, folder: Path) -> None:
        self.port = _free_port()
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.client: Any = redis.asyncio.Redis(port=self.port, decode_responses=True)
        self.name = ""

    def start(self) -> None:
        self._folder.mkdir(exist_ok=True)
        options = {
            "port": self.port, "bind": "127.0.0.1", "dir": self._folder, "cluster-enabled": "yes",
            "cluster-node-timeout": 3000, "appendonly": "yes", "appendfsync": "always", "save": "",
        }  # fmt: skip
        command = [
            find_redis_server(),
            *(str(part) for name, value in options.items() for part in (f"--{name}", value)),
        ]
        with (self._folder / "log").open("ab") as sink:
            self._process = subprocess.Popen(
                die_with_parent(command, signal.SIGTERM), stdin=subprocess.DEVNULL, stdout=sink, stderr=sink
            )

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    async def call(self, *words: Any) -> Any:
        return await self.client.execute_command(*words)


class LocalCluster:
    """Three primaries with a third of the slots each."""

    def __init__(self, folder: Path) -> None:
        self.nodes = [Node(folder / str(number)) for number in range(3)]

    @property
    def url(self) -> str:
        return "redis-cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    async def start(self) -> None:
        for node in self.nodes:
            node.start()
        for number, node in enumerate(self.nodes):
            await until(partial(node.call, "PING"))
            node.name = await node.call("CLUSTER", "MYID")
            await node.call("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            third = range(number * SLOTS // 3, (number + 1) * SLOTS // 3)
            await node.call("CLUSTER", "ADDSLOTS", *third)
        for one, other in itertools.combinations(self.nodes, 2):
            await one.call("CLUSTER", "MEET", "127.0.0.1", other.port)
        await self.ready()

    async def ready(self) -> None:
        """Waits until every node says that all is well."""

        async def well(node: Node) -> bool:
            info = await node.client.cluster("INFO")
            return bool(info["cluster_state"] == "ok" and int(info["cluster_known_nodes"]) == len(self.nodes))

        for node in self.nodes:
            await until(partial(well, node))

    async def owner(self, key: str) -> Node:
        """The node with the slot of a key."""
        ranges = await self.nodes[0].call("CLUSTER", "SLOTS")
        slot = slot_of(key)
        port = next(primary[1] for first, last, primary, *_ in ranges if first <= slot <= last)
        return next(node for node in self.nodes if node.port == port)

    async def begin_move(self, key: str, source: Node, target: Node) -> None:
        """From now on keys of the slot may lie on either node."""
        slot = slot_of(key)
        await target.call("CLUSTER", "SETSLOT", slot, "IMPORTING", source.name)
        await source.call("CLUSTER", "SETSLOT", slot, "MIGRATING", target.name)

    async def move_keys(self, key: str, source: Node, target: Node) -> int:
        """Carries over what there is; returns how many keys."""
        slot, moved = slot_of(key), 0
        while keys := await source.call("CLUSTER", "GETKEYSINSLOT", slot, 100):
            await source.call("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
            moved += len(keys)
        return moved

    async def end_move(self, key: str, source: Node, target: Node) -> None:
        """The slot is the target's; other nodes hear of it by and by."""
        for node in (target, source):
            await node.call("CLUSTER", "SETSLOT", slot_of(key), "NODE", target.name)

    async def disconnect(self) -> None:
        """Drops the connections of this event loop."""
        for node in self.nodes:
            await node.client.aclose()

    def stop(self) -> None:
        for node in self.nodes:
            node.kill()


async def until(condition: Callable[[], Any]) -> None:
    """Waits until a foreign process does as it should: it offers no event, so it is asked, within a deadline."""
    async with asyncio.timeout(_READY_S):
        while True:
            with contextlib.suppress(redis.RedisError, OSError):
                if await condition():
                    return
            await asyncio.sleep(0.02)


def _free_port() -> int:
    """A port below those that the system gives to clients, free together with its bus port."""
    for port in random.Random().sample(range(20_000, 30_000), 1000):
        with contextlib.ExitStack() as stack:
            try:
                for number in (port, port + _BUS):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", number))
            except OSError:
                continue
            return port
    raise OSError("no free pair of ports")
