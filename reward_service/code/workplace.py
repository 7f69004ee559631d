"""The sandbox of a process that scores programs: opened with the first program, closed with the event loop.

Invariant: at most as many programs are under way as the sandbox runs at a time. Others have not begun, and can be told
so, while there is time to try them again.
"""

from __future__ import annotations

import asyncio
import importlib.util
import marshal
import os
import time
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from pathlib import Path

from rollmesh.mesh.config.reward import RewardSection
from rollmesh.mesh.errors import RollmeshError
from rollmesh.reward_service.cache.memory import MemoryStore
from rollmesh.reward_service.code.imports import PRELOADED, with_imports
from rollmesh.reward_service.code.programs import PYTHON, Program
from rollmesh.reward_service.code.verdicts import SandboxError
from rollmesh.reward_service.sandbox.configured import open_executor
from rollmesh.reward_service.sandbox.interface import Executor, Job, Limits, Ran
from rollmesh.reward_service.sandbox.languages.building import Builder, CompileFailed

_INSIDE = Path(__file__).with_name("inside")
_START = "start.py"
# Flags of a compiled module that is used without a look at its source: PEP 552.
_UNCHECKED = (1).to_bytes(4, "little")
# Modules that tests import, besides those of programs; loaded once.
_PRELOADED = ("ast", "builtins", "inspect", "traceback", "types", *PRELOADED)
# A case that waits ends after so many times its CPU time, or this share of the time of a call.
_WAITS, _WAIT_SHARE = 4, 0.3
# Bytes for what tests ask first.
_ASKED = 16 << 20
# Bytes of output above what is expected.
_OUTPUT = 1 << 16


Opened = tuple[Executor, Builder]


class BusyError(Exception):
    """No program could be begun in time."""


class Workplace:
    """Runs programs under the limits of a configuration.

    Attributes:
        reward: of the configuration.
        section: `reward.code`.
        asked: what tests have answered before they knew anything of a program, by their digest.
    """

    def __init__(self, reward: RewardSection) -> None:
        self.reward = reward
        self.section = reward.code
        self.asked = MemoryStore(_ASKED)
        self._isolation = reward.isolation
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opened: asyncio.Task[Opened] | None = None
        self._gate: asyncio.Semaphore
        self._keeper: asyncio.Task[None]

    @asynccontextmanager
    async def turn(self, begin_by: float) -> AsyncIterator[Executor]:
        """Waits for a turn, and gives the executor for as long as the block runs.

        Args:
            begin_by: moment of `time.monotonic()` until which this waits.

        Raises:
            BusyError: there was no turn until then.
            RollmeshError: this host cannot confine programs.
        """
        opened = self._opened_here()
        try:
            async with asyncio.timeout(max(0.0, begin_by - time.monotonic())):
                executor, _ = await asyncio.shield(opened)
                await self._gate.acquire()
        except TimeoutError as error:
            raise BusyError from error
        try:
            yield executor
        finally:
            self._gate.release()

    def limits(self, *, cpu_s: float | None = None) -> Limits:
        """Limits of one run; `cpu_s`: other than those of a case."""
        cpu_s = cpu_s or self.section.case_s
        wall_s = min(_WAITS * cpu_s, _WAIT_SHARE * self.reward.scorer_timeout_s)
        return Limits(cpu_s=cpu_s, wall_s=wall_s, memory=self.section.memory_mb << 20)

    def python_job(self, files: Mapping[str, bytes], main: str, deadline: float, *, cpu_s: float | None = None) -> Job:
        """A job of Python files."""
        return Job("python", files, [main], limits=self.limits(cpu_s=cpu_s), deadline=deadline)

    def inside_job(
        self, names: Sequence[str], files: Mapping[str, bytes], deadline: float, *, cpu_s: float | None = None
    ) -> Job:
        """A job that calls `main` of the first of some modules of `inside/`, next to files."""
        return self.python_job({**files, **_inside(*names)}, _START, deadline, cpu_s=cpu_s)

    async def program_job(self, program: Program, deadline: float, *, expected: int) -> Job | str:
        """The job of a whole program that reads standard input, or the compiler's words about it.

        Args:
            expected: bytes of the longest output that is expected.

        Raises:
            SandboxError: the infrastructure kept it from being compiled.
            UnavailableError: the language is not to be had here.
        """
        source = with_imports(program.source) if program.language == PYTHON else program.source
        _, builder = await self._opened_here()
        built = await builder.build(program.language, source.encode(errors="replace"), deadline)
        if isinstance(built, CompileFailed):
            if built.ran.end == "infrastructure":
                raise SandboxError(built.ran.reason)
            return (built.ran.stderr or built.ran.stdout or built.ran.end.encode()).decode(errors="replace")
        own = self.limits()
        memory = own.memory if program.language == PYTHON else max(own.memory, built.limits.memory)
        output = 2 * expected + _OUTPUT
        return built.job(deadline=deadline, cpu_s=own.cpu_s, wall_s=own.wall_s, memory=memory, output=output)

    async def _open(self) -> Opened:
        executor = await open_executor(self._isolation, preload=_PRELOADED)
        return executor, Builder(executor, self._isolation.toolchains)

    def _opened_here(self) -> asyncio.Task[Opened]:
        """The executor of the running event loop: a loop that was blocked has been replaced."""
        loop = asyncio.get_running_loop()
        failed = self._opened is not None and self._opened.done() and self._opened.exception() is not None
        if self._opened is None or self._loop is not loop or failed:
            self._loop = loop
            self._gate = asyncio.Semaphore(self._isolation.concurrency or len(os.sched_getaffinity(0)))
            self._opened = loop.create_task(self._open())
            self._keeper = loop.create_task(_keep_open(self._opened))
        return self._opened


async def _keep_open(opened: asyncio.Task[Opened]) -> None:
    """Closes an executor when the task that runs this is cancelled, as its loop's end does."""
    try:
        executor, _ = await opened
    except RollmeshError:  # told to those who asked for it
        return
    try:
        await asyncio.Event().wait()
    finally:
        await executor.close()


_workplaces: weakref.WeakValueDictionary[int, Workplace] = weakref.WeakValueDictionary()


def workplace_of(reward: RewardSection) -> Workplace:
    """The one workplace of a configuration, shared by all scorers of it."""
    place = _workplaces.get(id(reward))
    if place is None or place.reward is not reward:
        place = _workplaces[id(reward)] = Workplace(reward)
    return place


def solution(program: Program) -> bytes:
    """A Python program as a module for its tests."""
    return with_imports(program.source).encode(errors="replace")


def text_inside(name: str) -> bytes:
    """The source of a file that runs in the sandbox."""
    return (_INSIDE / name).read_bytes()


@lru_cache
def _inside(*names: str) -> Mapping[str, bytes]:
    """Modules, and the file that calls `main` of the first of them, by name.

    They are compiled, which takes longer than all that they do. An interpreter of another version compiles the sources.
    """
    files = {_START: f"import {names[0]}\n{names[0]}.main()\n".encode()}
    for name in (f"{name}.py" for name in names):
        source = files[name] = text_inside(name)
        head = importlib.util.MAGIC_NUMBER + _UNCHECKED + importlib.util.source_hash(source)
        compiled = marshal.dumps(compile(source, name, "exec", dont_inherit=True))
        files[importlib.util.cache_from_source(name)] = head + compiled
    return files


async def run_one(executor: Executor, job: Job, stdin: bytes) -> Ran:
    """The end of one run.

    Raises:
        SandboxError: the infrastructure ended it.
    """
    (ran,) = await executor.run_all(job, [stdin])
    if ran.end == "infrastructure":
        raise SandboxError(ran.reason)
    return ran
