"""A contender as a process of its own, which answers passes, and what the processor time went to."""

from __future__ import annotations

import multiprocessing
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import psutil

from rollmesh.mesh.errors import RollmeshError

# A server on a busy machine takes minutes to come up.
_ANSWER_S = 600.0
_END_S = 20.0


class MeasurementError(RollmeshError):
    """A process of a measurement failed, or said nothing."""

    code = "measurement"


class Contender:
    """One process, spoken to over a pipe; it ends when it is told nothing more.

    Args:
        role: its function: takes the connection and `arguments`, and sends something once it is ready.
        arguments: of the role, picklable.

    Attributes:
        ready: what it sent.
        process: it.
    """

    def __init__(self, role: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        # Not a daemon: engines have processes of their own.
        self._process = context.Process(target=role, args=(theirs, *arguments))
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.process = psutil.Process(self._process.pid)
        try:
            self.ready = self._receive()
        except BaseException:
            self.end()
            raise

    def ask(self, request: Any) -> Any:
        """Sends a request and waits for its answer."""
        self._pipe.send(request)
        return self._receive()

    def end(self) -> None:
        """Ends it, gently at first."""
        self._pipe.close()
        self._process.join(_END_S)
        if self._process.is_alive():
            # In the middle of a pass whose result is not awaited. Engines end with the process that started them.
            self._process.terminate()
            self._process.join()

    def _receive(self) -> Any:
        if not self._pipe.poll(_ANSWER_S):
            raise MeasurementError(f"a contender said nothing for {_ANSWER_S:.0f} s")
        try:
            return self._pipe.recv()
        except EOFError as error:
            raise MeasurementError("a contender ended early", hint="its traceback is on the terminal") from error


def requests(pipe: Connection) -> Iterable[Any]:
    """In a contender: what it is asked for, until the other side is gone."""
    while True:
        try:
            yield pipe.recv()
        except EOFError:
            return


@dataclass(frozen=True, slots=True)
class Family:
    """A process and its descendants."""

    root: psutil.Process

    def cpu(self, name: str) -> dict[str, float]:
        """Processor seconds so far: of the root under `name`, of descendants under the names they bear."""
        used: dict[str, float] = defaultdict(float)
        used[name] += _seconds(self.root)
        for child in self.root.children(recursive=True):
            try:
                called = child.cmdline()[:1] or [child.name()]
                used[_short(called[0], child.cmdline())] += _seconds(child)
            except psutil.NoSuchProcess:
                continue
        return dict(used)


def spent(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Processor seconds between two looks, by name; what is less than a hundredth is left out."""
    every = {name: seconds - before.get(name, 0.0) for name, seconds in after.items()}
    return {name: seconds for name, seconds in every.items() if seconds >= 0.01}


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _short(title: str, command: list[str]) -> str:
    """The kind of a process, in a word: engines name theirs."""
    for sign in ("VLLM::", "sglang::"):
        if title.startswith(sign):
            return title.removeprefix(sign).split("_")[0].strip().lower()
    if "resource_tracker" in " ".join(command):
        return "tracker"
    if any("sglang.launch_server" in part or part.endswith("/forking_server.py") for part in command):
        return "server"
    return title.split()[0].rpartition("/")[2]
