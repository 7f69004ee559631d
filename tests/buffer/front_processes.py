"""Fronts as processes of their own, to be killed, stopped and continued."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from rollmesh.mesh.config import Config
from tests.buffer.mesh_fixture import START_S, HasAddress


@dataclass
class FrontProcess:
    """One front; `address` holds once it is ready."""

    process: subprocess.Popen[bytes]
    ready: Path
    log: Path
    address: str = ""

    async def wait_ready(self) -> None:
        async with asyncio.timeout(START_S):
            while not self.ready.exists():
                assert self.process.poll() is None, self.log.read_text()
                await asyncio.sleep(0.02)
        self.address = json.loads(self.ready.read_text())["address"]

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)


@dataclass
class Fronts:
    """Starts fronts of one run."""

    config: Config
    folder: Path
    processes: list[FrontProcess] = field(default_factory=list)

    async def start(self, count: int) -> list[FrontProcess]:
        path = self.folder / "config.yaml"
        path.write_text(yaml.safe_dump(self.config.model_dump(mode="json")))
        fresh = []
        for _ in range(count):
            name = f"front-{len(self.processes)}"
            ready, log = self.folder / f"{name}.json", self.folder / f"{name}.log"
            command = [sys.executable, "-m", "rollmesh.cli", "buffer", str(path), "--ready-file", str(ready)]
            with log.open("wb") as sink:
                process = subprocess.Popen(command, stdout=sink, stderr=sink)
            fresh.append(FrontProcess(process, ready, log))
            self.processes.append(fresh[-1])
        await asyncio.gather(*(front.wait_ready() for front in fresh))
        return fresh

    def close(self) -> None:
        for front in self.processes:
            if front.process.poll() is None:
                front.kill()


@dataclass(frozen=True)
class Together:
    """Several fronts as one mesh address."""

    address: str


def together(*fronts: HasAddress) -> Together:
    return Together(",".join(front.address for front in fronts))
