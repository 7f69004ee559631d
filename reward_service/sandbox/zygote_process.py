"""One zygote, as its owner sees it.

Invariant: once `end` has returned, nothing exists of the zygote and of what it has started: processes, folder, cgroup.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollmesh.mesh.errors import RewardError
from rollmesh.reward_service.sandbox.cgroups.cgroup import Cgroup
from rollmesh.reward_service.sandbox.cgroups.delegated import Delegated
from rollmesh.reward_service.sandbox.interface import Job, Ran, ended
from rollmesh.reward_service.sandbox.messages import HEAD, pack, unpack
from rollmesh.reward_service.sandbox.zygote import ORDINARY_USER

_PROGRAM = (
    "import sys; sys.path.append(sys.argv.pop(1)); "
    "from rollmesh.reward_service.sandbox.zygote import main; sys.path.pop(); main()"
)
# Contains the package, as it is imported here.
_ROOT = str(Path(__file__).parents[3])
# Seconds for a zygote to be ready, beyond what it loads; for an answer after the program's time; for its end.
_START_S, _ANSWER_S, _END_S = 60.0, 10.0, 5.0
_END = pack({})
_LOST = "the sandbox has ended, or has not answered in time"


class UnavailableError(RewardError):
    """This host, or this installation of Python, cannot confine programs as asked."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """Surroundings of all programs of an executor.

    Attributes:
        python: interpreter, 3.11 or later; an empty string for this process' own, or else the system's.
        readable: folders and files that programs may read and execute, besides the system's programs and libraries.
        preload: modules that a zygote imports once for all its programs; from the standard library.
        delegated: for a cgroup of each zygote; None for no cgroups.
    """

    python: str = ""
    readable: Sequence[str] = ()
    preload: Sequence[str] = ()
    delegated: Delegated | None = None


def _start(theirs: socket.socket, folder: str, python: str) -> subprocess.Popen[bytes]:
    if os.geteuid() == 0:
        os.chown(folder, ORDINARY_USER, ORDINARY_USER)
    return subprocess.Popen(
        [python, "-I", "-S", "-B", "-X", "utf8", "-c", _PROGRAM, _ROOT, str(theirs.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=(theirs.fileno(),),
        start_new_session=True,
        cwd="/",
        env={},
    )


def _settings(rung: int, folder: str, runtime: Runtime) -> bytes:
    readable = [os.path.abspath(path) for path in runtime.readable]
    return pack({"rung": rung, "folder": folder, "readable": readable, "preload": list(runtime.preload)})


class ZygoteProcess:
    """A zygote from its start to its end. It runs one job at a time."""

    def __init__(self, process: subprocess.Popen[bytes], folder: str, group: Cgroup | None) -> None:
        self.runs = 0
        self.landlock = 0
        self._process = process
        self._folder = folder
        self._group = group
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None

    @classmethod
    async def open(cls, rung: int, runtime: Runtime) -> ZygoteProcess:
        """A zygote that is ready for jobs on a rung.

        Raises:
            UnavailableError: this host lacks what the rung needs; the message names it.
        """
        ours, theirs = socket.socketpair()
        folder = tempfile.mkdtemp(prefix="rollmesh-sandbox-")
        group: Cgroup | None = None
        try:
            if runtime.delegated is not None:
                group = runtime.delegated.divide()
            process = _start(theirs, folder, runtime.python or sys.executable)
        except BaseException as error:
            ours.close()
            os.rmdir(folder)
            if group is not None:
                group.end()
            if isinstance(error, OSError):
                raise UnavailableError(f"no sandbox can be started: {error}") from error
            raise
        finally:
            theirs.close()
        zygote = cls(process, folder, group)
        try:
            await zygote._become_ready(ours, rung, runtime)
        except BaseException:
            await zygote.end()
            raise
        return zygote

    @property
    def pid(self) -> int:
        """Id of the process that this one has started."""
        return self._process.pid

    async def run_all(self, job: Job, inputs: Sequence[bytes], record: Callable[[Ran], bool]) -> Ran | None:
        """Runs a job for each input, until `record` returns true for an end.

        Returns:
            the end of the run in progress if the zygote is lost with it, and has to be ended; None: it takes another
            job.
        """
        if self._group is not None:
            content = sum(map(len, job.files.values())) + max(map(len, inputs), default=0)
            try:
                self._group.bound(job.limits, content)
            except OSError as error:
                return Ran("infrastructure", reason=f"the cgroup of the sandbox cannot be set: {error}")
        message = _begin(job)
        for number, stdin in enumerate(inputs, 1):
            left_s = job.deadline - time.monotonic()
            wall_s = min(job.limits.wall_s, left_s)
            if left_s <= 0:
                ran = Ran("infrastructure", reason="the deadline has passed before the program was run")
            else:
                message += pack({"wall_s": wall_s, "last": number == len(inputs)}, [stdin])
                try:
                    async with asyncio.timeout(wall_s + _ANSWER_S):
                        self._send(message)
                        answer, blobs = await self._receive()
                except (TimeoutError, OSError, EOFError, ValueError):
                    # The kernel kills the largest process: programs are larger than what watches them, but not always.
                    return Ran("memory", signal.SIGKILL) if self._has_killed() else Ran("infrastructure", reason=_LOST)
                message = b""
                self.runs += 1
                ran = _ran(answer, blobs, in_full=wall_s == job.limits.wall_s, killed=self._has_killed())
            if record(ran):
                break
        if not message:
            self._send(_END)
        return None

    async def end(self) -> None:
        """Ends the zygote and all that it has started, and waits for that; a second call does nothing."""
        if self._writer is not None:
            self._writer.transport.abort()
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, self._reap))

    def _reap(self) -> None:
        for order in (self._process.terminate, self._process.kill):
            order()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
                break
        if self._group is not None:
            self._group.end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _has_killed(self) -> bool:
        return self._group is not None and self._group.has_killed()

    async def _become_ready(self, ours: socket.socket, rung: int, runtime: Runtime) -> None:
        try:
            self._reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            ours.close()
            raise
        if self._group is not None:
            try:
                # It waits for its settings: all that it starts is in the cgroup too.
                self._group.enter(self._process.pid)
            except OSError as error:
                raise UnavailableError(f"the sandbox cannot be moved to {self._group.folder}: {error}") from error
        try:
            async with asyncio.timeout(_START_S):
                self._send(_settings(rung, self._folder, runtime))
                answer, _ = await self._receive()
        except (TimeoutError, OSError, EOFError) as error:
            raise UnavailableError(
                f"rung {rung}: the sandbox has ended, or was not ready within {_START_S:g} s",
                hint="it needs Python 3.11; its standard error is in this service's log",
            ) from error
        if "missing" in answer:
            raise UnavailableError(f"rung {rung}: {answer['missing']}")
        self.landlock = answer["landlock"]

    def _send(self, message: bytes) -> None:
        assert self._writer is not None
        self._writer.write(message)

    async def _receive(self) -> tuple[dict[str, Any], list[bytes]]:
        text_size, body_size = HEAD.unpack(await self._reader.readexactly(HEAD.size))
        return unpack(await self._reader.readexactly(text_size), await self._reader.readexactly(body_size))


def _begin(job: Job) -> bytes:
    fields = {
        "language": job.language,
        "argv": list(job.argv),
        "files": list(job.files),
        "outputs": list(job.outputs),
        "limits": asdict(job.limits),
        "environment": dict(job.environment),
    }
    return pack(fields, list(job.files.values()))


def _ran(answer: dict[str, Any], blobs: list[bytes], *, in_full: bool, killed: bool) -> Ran:
    if answer["failure"]:
        return Ran("infrastructure", reason=answer["failure"])
    if answer["cause"] == "wall" and not in_full and not killed:
        return Ran("infrastructure", reason="the deadline has passed before the program's time was over")
    end, code = ended(
        "memory" if killed else answer["cause"], answer["exit_code"], out_of_memory=answer["out_of_memory"]
    )
    files = dict(zip(answer["made"], blobs[2:], strict=True))
    return Ran(end, code, blobs[0], blobs[1], answer["cpu_s"], answer["peak"], answer["stalled_s"], files)
