"""Fronts as processes of their own, to be killed, stopped and continued."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import yaml

from rollmesh.mesh.config import Config
from tests import fork_server
from tests.buffer.mesh_fixture import START_S, HasAddress


class FrontProcess:
    """The buffer service as a process of its own; `address` holds once it is ready.

    Args:
        folder: for its configuration, its ready file and its log.
        config: as it is served.
        name: of these files.
        forked: from the fork server; a fork's resident memory grows with each page that it shares and first touches.
    """

    process: fork_server.RunningCommand | subprocess.Popen[bytes]

    def __init__(self, folder: Path, config: Config, name: str = "front", *, forked: bool = True) -> None:
        self._forked = forked
        self._config, self._ready, self._log = (folder / f"{name}.{kind}" for kind in ("yaml", "json", "log"))
        self._config.write_text(yaml.safe_dump(config.model_dump(mode="json")))
        self._port = 0
        self.address = ""

    async def start(self) -> None:
        """Starts it and waits for its ready file; a second start binds the same port."""
        self._ready.unlink(missing_ok=True)
        command = ["buffer", str(self._config), "--port", str(self._port), "--ready-file", str(self._ready)]
        with self._log.open("ab") as log:
            if self._forked:
                self.process = fork_server.popen(command, stdout=log, stderr=log)
            else:
                self.process = subprocess.Popen([*fork_server.CLI, *command], stdout=log, stderr=log)
        async with asyncio.timeout(START_S):
            while not self._ready.exists():
                assert self.process.poll() is None, self._log.read_text()
                await asyncio.sleep(0.02)
        self.address = json.loads(self._ready.read_text())["address"]
        self._port = int(self.address.rpartition(":")[2])

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def reset_peak(self) -> int:
        """Forgets the peak of the process' resident memory; returns what it has now, in bytes."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")
        return self.peak()

    def peak(self) -> int:
        """Most bytes of resident memory since `reset_peak`."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) << 10

    async def end(self, number: signal.Signals) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return await asyncio.to_thread(self.process.wait)


@dataclass
class Fronts:
    """Starts fronts of one run."""

    config: Config
    folder: Path
    processes: list[FrontProcess] = field(default_factory=list)

    async def start(self, count: int) -> list[FrontProcess]:
        there = len(self.processes)
        fresh = [FrontProcess(self.folder, self.config, f"front-{there + i}") for i in range(count)]
        self.processes += fresh
        await asyncio.gather(*(front.start() for front in fresh))
        return fresh

    async def close(self) -> None:
        for front in self.processes:
            await front.end(signal.SIGKILL)


@dataclass(frozen=True)
class Together:
    """Several fronts as one mesh address."""

    address: str


def together(*fronts: HasAddress) -> Together:
    return Together(",".join(front.address for front in fronts))
