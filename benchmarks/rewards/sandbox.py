"""The cost of confined programs by rung, the time until an overdue one is gone, and the remains of many executions.

Rates are of CPU time, of this process and of all that it has started, so that they hold on a machine with other work.
Every round measures all ways one after the other: ratios are of the same minute. A sandbox is opened for each way and
round. Its opening counts, as it does in a service, which replaces a sandbox after 1,000 executions.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import HelpFormatter, cpu_s, machine, summarize, table, write_json, yardstick
from rollmesh.reward_service.sandbox.executor import Sandbox
from rollmesh.reward_service.sandbox.interface import Executor, Job, Limits, Ran
from rollmesh.reward_service.sandbox.plugins.bubblewrap import Bubblewrap
from rollmesh.reward_service.sandbox.zygote_process import UnavailableError

_SOURCE = b"print(sum(map(int, input().split())))"
_LIMITS = Limits(cpu_s=60.0, wall_s=120.0)
_ADDS = Job("python", {"main.py": _SOURCE}, ["main.py"], b"1 2\n", _LIMITS)
_PYTHON = "/usr/bin/python3"
_MIB = 1 << 20


def main() -> None:
    """Measures, prints tables and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of all ways")
    parser.add_argument("--runs", type=int, default=900, help="executions of a way in a round")
    parser.add_argument("--cases", type=int, default=20, help="inputs of one job, for the cost of a further one")
    parser.add_argument("--overdue", type=int, default=100, help="overdue programs by rung")
    parser.add_argument("--many", type=int, default=10_000, help="executions by rung, for what they leave")
    parser.add_argument("--out", type=Path, help="JSON file")
    asyncio.run(_measure(parser.parse_args()))


async def _measure(options: argparse.Namespace) -> None:
    ways = await _ways(options.cases)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    moods = []
    for _ in range(options.rounds):
        moods.append(yardstick())
        for name, (run, per_call) in ways.items():
            calls = max(1, options.runs // per_call)
            rates[name].append(calls * per_call / await _cost_s(run, calls))
    found = {name: summarize(values) for name, values in rates.items()}
    print(table(["way", "executions per core and second", "CPU ms each"], _rate_rows(found)))
    overdue = {f"rung {rung}": await _overdue(rung, options.overdue) for rung in (2, 3)}
    print(table(["overdue", "median ms", "p99 ms"], [(name, *map(_ms, pair)) for name, pair in overdue.items()]))
    left = {f"rung {rung}": await _left(rung, options.many) for rung in (2, 3)}
    names = list(next(iter(left.values())))
    print(table(["left", *names], [(rung, *values.values()) for rung, values in left.items()]))
    if options.out:
        document = {"machine": machine(), "yardstick": moods, "rates": found, "overdue_s": overdue, "left": left}
        write_json(options.out, document)


def _rate_rows(found: dict[str, Any]) -> list[tuple[str, object, str]]:
    return [(name, summary, f"{1000 / summary.median:.2f}") for name, summary in found.items()]


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f}"


async def _ways(cases: int) -> dict[str, tuple[Callable[[int], Awaitable[float]], int]]:
    """By name: runs so many calls, and the executions of one call."""

    async def plain(calls: int) -> float:
        for _ in range(calls):
            argv = [_PYTHON, "-I", "-S", "-c", _SOURCE.decode()]
            await asyncio.to_thread(subprocess.run, argv, input=b"1 2\n", capture_output=True, check=True)
        return cpu_s()

    def rung(number: int, inputs: int) -> Callable[[int], Awaitable[float]]:
        async def run(calls: int) -> float:
            sandbox = await Sandbox.open(require=number, highest=number, size=1)
            try:
                for _ in range(calls):
                    _checked(await sandbox.run_all(_ADDS, [b"1 2\n"] * inputs))
                return cpu_s()
            finally:
                await sandbox.close()

        return run

    ways: dict[str, tuple[Callable[[int], Awaitable[float]], int]] = {"python3 -I -S, not confined": (plain, 1)}
    for number in (2, 3):
        ways[f"rung {number}"] = (rung(number, 1), 1)
        ways[f"rung {number}, {cases} inputs of one program"] = (rung(number, cases), cases)
    if (program := shutil.which("bwrap")) is not None:
        bubblewrap = Bubblewrap(program, [], 1)
        try:
            await bubblewrap.try_out()
            ways["rung 4, bubblewrap"] = (_of(bubblewrap), 1)
        except UnavailableError as error:
            print(error)
    return ways


def _of(executor: Executor) -> Callable[[int], Awaitable[float]]:
    async def run(calls: int) -> float:
        for _ in range(calls):
            _checked([await executor.run(_ADDS)])
        return cpu_s()

    return run


def _checked(ran: list[Ran]) -> None:
    assert all(each.stdout == b"3\n" for each in ran), ran


async def _cost_s(run: Callable[[int], Awaitable[float]], calls: int) -> float:
    began = cpu_s()
    return await run(calls) - began


async def _overdue(rung: int, count: int) -> tuple[float, float]:
    """Median and p99 of the seconds from the end of a program's time to the answer."""
    sandbox = await Sandbox.open(require=rung, highest=rung, size=1)
    limits = Limits(cpu_s=60.0, wall_s=0.05)
    job = Job("python", {"main.py": b"while True: pass"}, ["main.py"], limits=limits)
    late = []
    try:
        for _ in range(count):
            began = time.monotonic()
            ran = await sandbox.run(job)
            late.append(time.monotonic() - began - limits.wall_s)
            assert ran.end == "wall", ran
    finally:
        await sandbox.close()
    late.sort()
    return late[len(late) // 2], late[min(len(late) - 1, int(0.99 * len(late)))]


async def _left(rung: int, count: int) -> dict[str, int]:
    """Remains of so many executions, in this process and on this host; one before them opens what stays open."""
    sandbox = await Sandbox.open(require=rung, highest=rung)
    await sandbox.run(_ADDS)
    await sandbox.close()
    before = _state()
    sandbox = await Sandbox.open(require=rung, highest=rung)
    try:
        for _ in range(count // 100):
            _checked(await asyncio.gather(*(sandbox.run(_ADDS) for _ in range(100))))
    finally:
        await sandbox.close()
    return {name: value - before[name] for name, value in _state().items()}


def _state() -> dict[str, int]:
    process = psutil.Process()
    return {
        "processes": len(process.children(recursive=True)),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mounts": len(Path("/proc/self/mountinfo").read_text(encoding="ascii").splitlines()),
        "folders": len(list(Path(tempfile.gettempdir()).glob("rollmesh-sandbox-*"))),
        "memory MiB": process.memory_info().rss // _MIB,
    }


if __name__ == "__main__":
    main()
