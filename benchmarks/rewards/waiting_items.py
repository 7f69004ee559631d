"""Memory of a reward service and of its client while items wait: 10,000 of them, scored slowly.

The service is `rollmesh reward serve` with a function that sleeps. The client is that of a generator. It submits all
items at once, a group at a time. Shown is the largest resident memory of each, with their children, above that of the
same processes before. Every item has its score in the end.

    python -m benchmarks.rewards.waiting_items --items 10000 --characters 4000 --json waiting.json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import yaml

from benchmarks.common import REPOSITORY, HelpFormatter, machine, table, write_json
from rollmesh.protos import reward_pb2
from rollmesh.reward_service.client.client import CallLimits, RewardClient

_GROUP = 8
_START_S = 60.0


async def sleeps(solution_str: str, ground_truth: str) -> float:
    """A reward that takes as many seconds as the ground truth says."""
    await asyncio.sleep(float(ground_truth))
    return float(len(solution_str))


def document(folder: Path) -> Path:
    """A configuration of the service."""
    path = folder / "cfg.yaml"
    reward = {"functions": [f"{REPOSITORY / 'benchmarks' / 'rewards' / 'waiting_items.py'}:sleeps"]}
    content = {
        "run": {"name": "queue", "dir": str(folder)},
        # A configuration names both; the service reads neither.
        "model": {"path": "model"},
        "data": {"train": "train.parquet"},
        "reward": reward,
        "network": {"metrics": False},
    }
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def items_of(group: int, characters: int, seconds: float) -> list[reward_pb2.ScoreItem]:
    """A group's items, each with a response of its own."""
    return [
        reward_pb2.ScoreItem(
            item_id=f"{group}/{member}",
            group_id=str(group),
            data_source="queue",
            prompt="Write a letter.",
            response=f"{group}/{member}".ljust(characters, "x"),
            ground_truth_json=str(seconds),
            response_ids=range(characters // 4),
        )
        for member in range(_GROUP)
    ]


def resident(process: psutil.Process) -> int:
    """Bytes of a process and of all below it."""
    total = 0
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            total += each.memory_info().rss
    return total


async def measure(address: str, service: psutil.Process, options: argparse.Namespace) -> dict[str, float]:
    """Megabytes above those at the start, and seconds until all items had their scores."""
    client = RewardClient([address], limits=CallLimits(timeout_s=20.0, wait_s=600.0))
    groups = options.items // _GROUP
    await client.score(items_of(groups, options.characters, 0.0))
    me = psutil.Process()
    before = resident(service), me.memory_info().rss
    most = list(before)
    began = time.monotonic()
    waiting = [
        asyncio.create_task(client.score(items_of(group, options.characters, options.seconds)))
        for group in range(groups)
    ]
    everything = asyncio.gather(*waiting)
    while not everything.done():
        most = [max(most[0], resident(service)), max(most[1], me.memory_info().rss)]
        await asyncio.wait((everything,), timeout=0.5)
    scored = sum(result.HasField("scored") for results in await everything for result in results)
    if scored != groups * _GROUP:
        raise RuntimeError(f"{scored} of {groups * _GROUP} items have a score")
    await client.close()
    return {
        "service_mb": (most[0] - before[0]) / 1e6,
        "service_before_mb": before[0] / 1e6,
        "client_mb": (most[1] - before[1]) / 1e6,
        "seconds": time.monotonic() - began,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--items", type=int, default=10_000, help="that wait together")
    parser.add_argument("--characters", type=int, default=4_000, help="of a response")
    parser.add_argument("--seconds", type=float, default=0.1, help="that a score takes")
    parser.add_argument("--json", type=Path, help="file to write")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        ready = folder / "ready"
        command = [sys.executable, "-m", "rollmesh.cli", "reward", "serve", str(document(folder))]
        with (folder / "service.log").open("wb") as log:
            process = subprocess.Popen(
                [*command, "--ready-file", str(ready)], cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT
            )
        try:
            until = time.monotonic() + _START_S
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError((folder / "service.log").read_text(encoding="utf-8"))
                time.sleep(0.05)
            address = f"grpc://{json.loads(ready.read_text(encoding='utf-8'))['address']}"
            found = asyncio.run(measure(address, psutil.Process(process.pid), options))
        finally:
            process.terminate()
            process.wait(30)
    header = ("items", "characters each", "service MB more", "service MB before", "client MB more", "s")
    values = (f"{found[key]:.0f}" for key in ("service_mb", "service_before_mb", "client_mb", "seconds"))
    print(table(header, [(options.items, options.characters, *values)]))
    if options.json:
        write_json(
            options.json, {"machine": machine(), "items": options.items, "characters": options.characters} | found
        )


if __name__ == "__main__":
    main()
