"""The whole generator service: buffer front and Redis, a learner's stand-in, and a generator as users start it."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from benchmarks.buffer import front
from benchmarks.common import REPOSITORY
from benchmarks.engines.fake_learner import BATCH_GROUPS, RUN, learner
from benchmarks.engines.plan import Arrival, Plan
from benchmarks.engines.worker_process import Contender, Family, MeasurementError

_READY_S = 60.0
_END_S = 60.0


def configuration(plan: Plan, folder: Path) -> dict[str, Any]:
    """The run's configuration: rewards in the generator, no bound of staleness to throttle it, else the defaults."""
    rewards = REPOSITORY / "benchmarks" / "reward_functions.py"
    return {
        "run": {"dir": str(folder), "name": RUN},
        "model": {"path": str(plan.model)},
        "data": {"train": "none"},
        "rollout": plan.rollout,
        "reward": {"in_process": True, "functions": [f"{rewards}:letter_order"]},
        "learner": {"device": "cpu", "batch": {"groups": BATCH_GROUPS}},
        "buffer": {"order": "fifo", "max_staleness": 1_000_000},
        "weights": {"kv": plan.kv},
        "network": {"metrics": False},
    }


class Service:
    """The processes; a context.

    Args:
        plan: what a pass asks for.
        folder: an empty one.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan = plan
        self._folder = folder
        self._stack = ExitStack()

    def __enter__(self) -> Service:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        ready = self._folder / "buffer.json"
        buffer = multiprocessing.get_context("spawn").Process(
            target=front.serve, args=(configuration(self._plan, self._folder), ready, None)
        )
        buffer.start()
        self._stack.callback(buffer.join, _END_S)
        self._stack.callback(buffer.terminate)
        assert buffer.pid is not None
        self._buffer = Family(psutil.Process(buffer.pid))
        address = _address(ready, buffer)
        self._learner = Contender(learner, self._plan, address)
        self._stack.callback(self._learner.end)
        # Never read: the run's configuration says how much is logged.
        self._generator = subprocess.Popen(
            [sys.executable, "-m", "rollmesh.cli", "generator", "--mesh", address, "--threads", "1"], cwd=REPOSITORY
        )
        self._stack.callback(self._end_generator)
        self._family = Family(psutil.Process(self._generator.pid))

    def _end_generator(self) -> None:
        self._generator.terminate()
        try:
            self._generator.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._generator.kill()
            self._generator.wait()

    def one_pass(self, groups: int) -> list[Arrival]:
        """Runs a pass of that many groups; returns what was stored of it, as it came to the learner.

        Raises:
            MeasurementError: the generator has ended, or nothing came.
        """
        if self._generator.poll() is not None:
            raise MeasurementError(f"the generator has ended with {self._generator.returncode}")
        arrivals: list[Arrival] = self._learner.ask(groups)
        return arrivals

    def cpu(self) -> dict[str, float]:
        """Processor seconds so far, by process."""
        learner = Family(self._learner.process).cpu("learner")
        return self._family.cpu("generator") | self._buffer.cpu("buffer") | {"learner": learner["learner"]}


def _address(ready: Path, process: Any) -> str:
    deadline = time.monotonic() + _READY_S
    while not ready.exists():
        if not process.is_alive() or time.monotonic() > deadline:
            raise MeasurementError("the buffer service did not start", hint="its log is on the terminal")
        time.sleep(0.02)
    return str(json.loads(ready.read_text(encoding="utf-8"))["address"])
