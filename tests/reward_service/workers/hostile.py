"""Reward functions that do what no reward function should, as the response says. Loaded by worker processes."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgpack

from rollmesh.reward_service.workers import shared_page


def overdue() -> None:
    """Lets the time of the current call be over: the page says that it began long ago."""
    frame = sys._getframe()
    while "page" not in frame.f_locals:
        assert frame.f_back is not None
        frame = frame.f_back
    struct.pack_into("@d", frame.f_locals["page"]._map, shared_page._BEGAN_AT, time.monotonic() - 3600)


def _hang() -> None:
    overdue()
    time.sleep(600)


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> Any:
    """verl's signature: 1.0, unless `solution_str` names one of the acts below (`act argument`)."""
    act, _, argument = solution_str.partition(" ")
    return ACTS[act](argument) if act in ACTS else 1.0


def judge_group(completions: list[str], **_: Any) -> list[float]:
    """TRL's signature: the size of the group; hangs or dies where a member says so."""
    for text in completions:
        compute_score("", text, None, None)
    return [float(len(completions))] * len(completions)


_arrived: list[str] = []
_all_arrived = asyncio.Event()


async def judge(solution_str: str, ground_truth: Any) -> float:
    """A coroutine function: 1.0, unless told otherwise."""
    act, _, argument = solution_str.partition(" ")
    if act == "block":
        _hang()
    elif act == "block-in-task":
        await asyncio.create_task(_blocking())
    elif act == "deaf":
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(600)
    elif act == "meet-others":
        _arrived.append(solution_str)
        if len(_arrived) == int(argument):
            _all_arrived.set()
        await _all_arrived.wait()
    elif act == "await":
        await asyncio.sleep(float(argument))
    elif act in ACTS:
        ACTS[act](argument)
    await asyncio.sleep(0)
    return 1.0


async def _blocking() -> None:
    # It belongs to no unit, so that the page cannot say how long it takes.
    time.sleep(600)


def _deep(depth: int) -> int:
    return _deep(depth + 1) + 1


def _ctypes_crash() -> None:
    os.close(2)  # no core, no fault handler's page in the log
    ctypes.string_at(0)


def _child(path: str) -> None:
    """Leaves a child in the worker's process group, tells its number, and hangs."""
    child = subprocess.Popen(["sleep", "600"])
    Path(path).write_text(str(child.pid))
    _hang()


def _orphan(path: str) -> float:
    """Starts what outlives its parent, tells its number, and ends in order."""
    subprocess.run(["sh", "-c", f"sleep 0.1 & echo $! > {path}"], check=True)
    return 1.0


def _forked(_: str) -> None:
    """Dies, and leaves a fork of the worker that holds all that it held."""
    if os.fork() == 0:
        time.sleep(600)
    os._exit(4)


def _stubborn_thread() -> None:
    threading.Thread(target=lambda: [None for _ in iter(int, 1)]).start()


def _meet(path: str) -> float:
    """Says over a fifo that it is busy, and stays so."""
    Path(path).write_text(str(os.getpid()))
    time.sleep(600)
    return 1.0


def _gate(path: str) -> float:
    """Says over a fifo that it is busy, and stays so until something is written to another one."""
    Path(path).write_text(str(os.getpid()))
    with Path(f"{path}-on").open("rb", 0) as on:
        on.read(1)
    return 1.0


def _alarm(_: str) -> float:
    """Signals reach a plain function: it runs in the main thread."""
    rung = []
    signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    while not rung:
        time.sleep(0.01)
    return 2.0


def _tell(path: str) -> float:
    """Says by a file that it was called."""
    Path(path).touch()
    return 1.0


_TRIPPED = threading.Event()
_armed: list[threading.Thread] = []


def _arm(_: str) -> float:
    """Leaves a thread that ends the process in the midst of the next `trip`."""
    _armed.append(threading.Thread(target=lambda: _TRIPPED.wait() and os._exit(9), daemon=True))
    _armed[0].start()
    return 1.0


def _trip(_: str) -> float:
    _TRIPPED.set()
    if _armed:
        time.sleep(600)
    return 1.0


def _each_descriptor(act: Any) -> float:
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if descriptor > 2:
                act(descriptor)
    return 1.0


FORGED = {
    "nothing": b"\xc1" * 100,
    "kind": msgpack.packb("x"),
    "unit": msgpack.packb(["done", [[[1], None]]]),
    "bytes": msgpack.packb(["done", [[0, 5]]]),
    "outcome": msgpack.packb(["done", [[0, msgpack.packb([[9, 9, 9]])]]]),
    "number": msgpack.packb(["done", [[0, msgpack.packb([[0, None, {}, [], [], "", 0.0, False]])]]]),
    "parts": msgpack.packb(["done", [[0, msgpack.packb([[0, 1.0, [], [], [], "", 0.0, False]])]]]),
    "ready": msgpack.packb(["ready", [[False, False]]]),
}


def _forge(form: str) -> float:
    """Writes to the owner in the worker's place."""
    return _each_descriptor(lambda descriptor: socket.socket(fileno=os.dup(descriptor)).send(FORGED[form]))


def _escape(path: str) -> None:
    """Leaves a child in a session of its own, below a parent that has ended, tells its number, and hangs."""
    subprocess.run(["sh", "-c", f"setsid sleep 600 & echo $! > {path}"], check=True)
    _hang()


ACTS = {
    "sleep": lambda argument: time.sleep(float(argument or 600)) or 1.0,
    "hang": lambda _: _hang(),
    "hang-until-over": lambda path: Path(path).read_text() and _hang(),
    "spin": lambda _: overdue() or 9 ** (9**9),
    "stop": lambda _: overdue() or os.kill(os.getpid(), signal.SIGSTOP),
    "child": _child,
    "orphan": _orphan,
    "exit": lambda argument: os._exit(int(argument or 3)),
    "segfault": lambda _: _ctypes_crash(),
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "realtime": lambda _: os.kill(os.getpid(), signal.SIGRTMIN + 6),
    "closefds": lambda _: (os.closerange(3, 1 << 16), time.sleep(600)),
    "fork": _forked,
    "interrupt": lambda _: (_ for _ in ()).throw(KeyboardInterrupt),
    "SystemExit": lambda _: sys.exit(7),
    "memory": lambda _: bytearray(1 << 60),
    "recursion": lambda _: _deep(0),
    "raise": lambda argument: (_ for _ in ()).throw(ValueError(argument * 100_000)),
    "surrogate": lambda _: (_ for _ in ()).throw(ValueError("\ud800")),
    "nan": lambda _: float("nan"),
    "text": lambda _: "1.0",
    "object": lambda _: threading.Lock(),
    "names": lambda _: {"score": 1.0, "\ud800": 1.0},
    "huge": lambda _: {"score": 1.0, **{f"{n:0100000}": 1.0 for n in range(200)}},
    "print": lambda argument: print(argument) or (os.write(1, b"and by number\n") and 2.0),
    "thread": lambda _: _stubborn_thread() or 2.0,
    "loop": lambda _: asyncio.run(asyncio.sleep(0, 2.0)),
    "alarm": _alarm,
    "meet": _meet,
    "gate": _gate,
    "tell": _tell,
    "arm": _arm,
    "trip": _trip,
    "alarm-later": lambda _: signal.setitimer(signal.ITIMER_REAL, 600) and 1.0,
    "alarm-left": lambda _: signal.getitimer(signal.ITIMER_REAL)[0],
    "close-and-return": lambda _: os.closerange(3, 1 << 16) or 1.0,
    "truncate": lambda _: _each_descriptor(lambda descriptor: os.ftruncate(descriptor, 0)),
    "forge": _forge,
    "escape": _escape,
}
