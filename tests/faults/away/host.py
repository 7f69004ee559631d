"""One process of the matrix: it hosts fronts, learners or generators of many runs, which are stopped all at once.

Orders come as JSON lines on the standard input, events go as JSON lines to the standard output.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollmesh.buffer.server.process import BufferFront
from rollmesh.mesh.config import Config
from rollmesh.mesh.runtime.async_bridge import AsyncBridge
from tests.faults.away.generator import Generator
from tests.faults.away.member import say

if TYPE_CHECKING:
    from tests.faults.away.learner import Learner


class Guests:
    """Carries the orders out."""

    def __init__(self) -> None:
        self._generators: dict[tuple[str, str], Generator] = {}
        self._kept: list[Any] = []
        self._bridge: AsyncBridge | None = None

    async def obey(self, order: dict[str, Any]) -> None:
        do, run = order["do"], order["run"]
        if do == "allow":
            self._generators[run, order["name"]].allow(order["groups"])
            return
        try:
            await getattr(self, f"_{do}")(run, order)
        except Exception as error:
            say(run, "ready", what=do, error=repr(error))
            raise
        say(run, "ready", what=do)

    async def _front(self, run: str, order: dict[str, Any]) -> None:
        config = Config.model_validate_json(Path(order["config"]).read_text())
        service = BufferFront(config, host="127.0.0.1", port=order["port"])
        await service.start()
        self._kept.append(service)

    async def _generate(self, run: str, order: dict[str, Any]) -> None:
        generator = Generator(run, order["name"], order["mesh"], order["most"])
        await generator.start()
        self._generators[run, order["name"]] = generator

    async def _learn(self, run: str, order: dict[str, Any]) -> None:
        # It imports torch, which the other processes do without.
        from tests.faults.away.learner import Learner

        self._bridge = self._bridge or AsyncBridge()
        bridge, folder = self._bridge, Path(order["folder"])

        async def open_learner() -> Learner:
            learner = Learner(run, order["mesh"], folder, order["groups"], order["commit_every"], bridge)
            await learner.open()
            return learner

        learner = await asyncio.wrap_future(bridge.submit(open_learner()))
        threading.Thread(target=learner.train, daemon=True).start()


async def main() -> None:
    """Until the standard input ends."""
    guests = Guests()
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    tasks = set()
    while line := await reader.readline():
        task = asyncio.create_task(guests.obey(json.loads(line)))
        tasks.add(task)
        task.add_done_callback(lambda done: done.result())


if __name__ == "__main__":
    asyncio.run(main())
