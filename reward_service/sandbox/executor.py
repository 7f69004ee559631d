"""An executor that confines programs on this host: a pool of zygotes, with a warm one in reserve.

Invariants
  * At most `size` jobs run at once, each in a zygote of its own; others wait until their deadline.
  * A zygote that is lost, or has run its share of jobs, is ended and replaced.
  * Nothing runs unconfined: where the host lacks the rung that is required, `Sandbox.open` raises.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from rollmesh.mesh.runtime.background_tasks import BackgroundTasks, log_errors
from rollmesh.reward_service.sandbox.cgroups.delegated import Delegated, MissingError
from rollmesh.reward_service.sandbox.ends import Ends
from rollmesh.reward_service.sandbox.interface import Job, Ran
from rollmesh.reward_service.sandbox.landlock import SCOPES
from rollmesh.reward_service.sandbox.linux import AUDIT_ARCHITECTURES, MACHINE
from rollmesh.reward_service.sandbox.zygote_process import Runtime, UnavailableError, ZygoteProcess

log = logging.getLogger(__name__)

HIGHEST, LOWEST = 3, 2
WHAT = {
    2: "resource limits, Landlock and a list of allowed system calls",
    3: "namespaces, resource limits, Landlock and a list of allowed system calls",
}
_SYSTEM_PYTHON = "/usr/bin/python3"
# Runs of one zygote.
_SHARE = 1000
# Zygotes that one job may lose.
_ZYGOTES = 3


class Sandbox:
    """Runs programs on the highest rung that this host allows; see docs/isolation.md.

    Attributes:
        rung: the rung in force, 2 or 3.
        missing: reason why a higher rung is not in force; empty if it is the highest.
    """

    languages = frozenset({"python", "native"})

    def __init__(
        self, zygote: ZygoteProcess, rung: int, missing: str, runtime: Runtime, cgroups: str, size: int
    ) -> None:
        self.rung = rung
        self.missing = missing
        self._cgroups = cgroups
        self._runtime = runtime
        self._landlock = zygote.landlock
        self._idle = [zygote]
        self._size = size
        self._slots = asyncio.Semaphore(size)
        self._closed = False
        self._tasks = BackgroundTasks(log_errors(log))

    @classmethod
    async def open(
        cls, *, require: int = LOWEST, highest: int = HIGHEST, size: int = 0, runtime: Runtime | None = None
    ) -> Sandbox:
        """An executor on the highest rung that this host allows.

        Args:
            require: the least rung; `LOWEST` takes any.
            highest: the rung to begin with.
            size: jobs at once; 0 for as many as this process has CPUs.
            runtime: surroundings of the programs.

        Raises:
            UnavailableError: the host does not allow the rung that is required; the message says what it lacks.
        """
        surroundings, cgroups = await asyncio.to_thread(_with_cgroups, runtime or Runtime())
        reasons = []
        for rung in range(highest, max(require, LOWEST) - 1, -1):
            try:
                zygote, surroundings = await _first(rung, surroundings)
            except UnavailableError as error:
                reasons.append(error.message)
                continue
            size = size or len(os.sched_getaffinity(0))
            sandbox = cls(zygote, rung, "; ".join(reasons), surroundings, cgroups, size)
            log.info("programs run confined", extra={"rung": rung, "missing": sandbox.missing, "cgroups": cgroups})
            return sandbox
        raise UnavailableError(
            f"programs cannot be confined on rung {require} or above: {'; '.join(reasons) or 'there is none'}",
            hint="docs/isolation.md says what each rung needs",
        )

    async def run_all(
        self, job: Job, inputs: Sequence[bytes], *, stop: Callable[[Ran], bool] | None = None
    ) -> list[Ran]:
        """See `Executor.run_all`. The runs of a job are in one zygote; where it is lost, the rest is in another.

        Raises:
            UnavailableError: the job needs child processes, and this host cannot keep signals among them; or it
                makes files on rung 2, which has none.
        """
        if job.limits.processes > 1 and (self.rung < HIGHEST or self._landlock < SCOPES):
            raise UnavailableError(
                f"a program of {job.limits.processes} processes needs rung {HIGHEST} and Landlock {SCOPES} (Linux 6.12)"
            )
        if job.outputs and self.rung < HIGHEST:
            raise UnavailableError(f"a program that makes files needs rung {HIGHEST}")
        ends = Ends(len(inputs), stop)
        wait_s = None if job.deadline == float("inf") else max(0.0, job.deadline - time.monotonic())
        try:
            async with asyncio.timeout(wait_s):
                await self._slots.acquire()
        except TimeoutError:
            return ends.filled("the deadline has passed while the job waited for its turn")
        try:
            return await self._run_all(job, inputs, ends)
        except UnavailableError as error:
            return ends.filled(str(error))
        finally:
            self._slots.release()

    async def run(self, job: Job) -> Ran:
        """See `Executor.run`."""
        (ran,) = await self.run_all(job, [job.stdin])
        return ran

    def describe(self) -> str:
        """See `Executor.describe`."""
        higher = f"; no higher one ({self.missing})" if self.missing else ""
        return f"rung {self.rung}: {WHAT[self.rung]}; {self._cgroups}{higher}"

    async def close(self) -> None:
        """Ends all zygotes, once the jobs in progress have ended."""
        self._closed = True
        for _ in range(self._size):
            await self._slots.acquire()
        await self._tasks.close()
        while self._idle:
            await self._idle.pop().end()
        for _ in range(self._size):
            self._slots.release()

    async def _run_all(self, job: Job, inputs: Sequence[bytes], ends: Ends) -> list[Ran]:
        for _ in range(_ZYGOTES):
            if self._closed:
                return ends.filled("the executor is closed")
            zygote = self._idle.pop() if self._idle else await ZygoteProcess.open(self.rung, self._runtime)
            kept = False
            try:
                lost = await zygote.run_all(job, inputs[len(ends.known) :], ends.record)
                kept = lost is None
            finally:
                await self._put_back(zygote, kept)
            if lost is None or ends.record(lost):
                return ends.known
        return ends.filled(f"the job has lost {_ZYGOTES} sandboxes")

    async def _put_back(self, zygote: ZygoteProcess, kept: bool) -> None:
        if kept and zygote.runs < _SHARE and not self._closed:
            self._idle.append(zygote)
            return
        await zygote.end()
        self._replace()

    def _replace(self) -> None:
        if not self._closed:
            self._tasks.spawn(self._open_reserve(), "opening a sandbox")

    async def _open_reserve(self) -> None:
        if not self._idle:
            self._idle.append(await ZygoteProcess.open(self.rung, self._runtime))


def _with_cgroups(runtime: Runtime) -> tuple[Runtime, str]:
    """Surroundings with the cgroups of this host, unless they have some; and what these bound, or lack, for people."""
    try:
        delegated = runtime.delegated or Delegated.find()
    except MissingError as missing:
        return runtime, f"no cgroup bounds all processes of a program together ({missing})"
    return replace(runtime, delegated=delegated), delegated.describe()


async def _first(rung: int, runtime: Runtime) -> tuple[ZygoteProcess, Runtime]:
    """A zygote, by this process' interpreter or the system's, and the runtime with which it works.

    Raises:
        UnavailableError: with neither.
    """
    if sys.platform != "linux" or MACHINE not in AUDIT_ARCHITECTURES:
        raise UnavailableError(f"rung {rung}: Linux on {' or '.join(AUDIT_ARCHITECTURES)}")
    try:
        return await ZygoteProcess.open(rung, runtime), runtime
    except UnavailableError:
        if runtime.python or shutil.which(_SYSTEM_PYTHON) is None:
            raise
    runtime = replace(runtime, python=_SYSTEM_PYTHON)
    return await ZygoteProcess.open(rung, runtime), runtime
