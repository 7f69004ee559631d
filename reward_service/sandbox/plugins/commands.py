"""Programs on this host, confined by another program: bubblewrap, or a runtime for containers.

A job's files lie in a folder that the confinement shows read-only. A shell inside copies them to a file system in
memory, takes limits upon itself, and becomes the program. Files that the program makes leave over standard output.

Invariant: when a job ends, none of its processes is left, and no folder.
"""

from __future__ import annotations

import asyncio
import math
import os
import shlex
import shutil
import signal
import tempfile
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollmesh.reward_service.sandbox.interface import Cause, Job, Limits, Ran, ended
from rollmesh.reward_service.sandbox.plugins.execution import Executed
from rollmesh.reward_service.sandbox.plugins.turns import PluginExecutor
from rollmesh.reward_service.sandbox.zygote_process import UnavailableError

SHOWN, FOLDER = "/box/job", "/box/work"
"""Where a job's files are shown, and where its program runs."""
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache", "/etc/alternatives")
_PYTHON = ("/usr/bin/python3", "-s", "-E", "-B", "-X", "utf8")
# The shell's first words: without them, nothing of the program has run.
_BEGUN = b"\x01begun\n"
# Processes besides the program's: the confinement's own.
_OWN_TASKS = 16
_TRY_S = 30.0
# Share of the CPU time at which a signal is for that: the kernel counts by ticks.
_NEARLY = 0.9


@dataclass(frozen=True, slots=True)
class Confined:
    """A process that is to be confined.

    Attributes:
        argv: of the first process.
        environment: its variables.
        files: folder of the host, for `SHOWN`.
        readable: paths of the host that it may read.
        disk: bytes of `FOLDER`.
    """

    argv: Sequence[str]
    environment: Mapping[str, str]
    files: Path
    readable: Sequence[str]
    disk: int


class CommandExecutor(PluginExecutor):
    """An executor that runs another program for each run.

    Args:
        program: path of the confining program.
        readable: paths that programs may read, besides the system's.
        size: jobs at once; 0 for as many as this process has CPUs.
    """

    def __init__(self, program: str, readable: Sequence[str], size: int) -> None:
        super().__init__(frozenset({"python", "native"}), size)
        self.program = program
        self._readable = [path for path in (*_SYSTEM, *readable) if os.path.lexists(path)]

    async def try_out(self) -> None:
        """Runs a program that does nothing.

        Raises:
            UnavailableError: with the reason why it did not run.
        """
        ran = await self.run(Job("native", {}, ["/bin/true"], deadline=time.monotonic() + _TRY_S))
        if (ran.end, ran.code) != ("exit", 0):
            raise UnavailableError(f"{self.describe()} does not work here: {ran.reason or ran.stderr.decode()}")

    async def close(self) -> None:
        """Does nothing: what was started has ended with its job."""

    @abstractmethod
    async def _execute(self, confined: Confined, stdin: bytes, most: int, wall_s: float) -> Executed:
        """Runs the confining program to its end."""

    async def _runs(self, job: Job, inputs: Sequence[bytes]) -> AsyncIterator[Ran]:
        folder = Path(tempfile.mkdtemp(prefix="rollmesh-sandbox-"))
        try:
            files = folder / "job"
            await asyncio.to_thread(_lay_out, folder, files, job.files)
            program = [*_PYTHON, *job.argv] if job.language == "python" else job.argv
            argv = ["/bin/sh", "-c", _script(job), "sh", *program]
            confined = Confined(argv, job.environment, files, self._readable, job.limits.disk)
            most = job.limits.output + len(_BEGUN) + (job.limits.disk if job.outputs else 0)
            for stdin in inputs:
                yield await self._run_once(job, confined, stdin, most)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def _run_once(self, job: Job, confined: Confined, stdin: bytes, most: int) -> Ran:
        wall_s = min(job.limits.wall_s, job.deadline - time.monotonic())
        if wall_s <= 0:
            return Ran("infrastructure", reason="the deadline has passed before the program was run")
        try:
            done = await self._execute(confined, stdin, most, wall_s)
        except OSError as error:
            return Ran("infrastructure", reason=f"{self.program} cannot be run: {error}")
        if not done.stderr.startswith(_BEGUN):
            told = done.stderr.decode(errors="replace").strip()
            return Ran("infrastructure", reason=f"{self.program}: {told or f'exit code {done.exit_code}'}")
        if done.cause == "wall" and wall_s < job.limits.wall_s:
            return Ran("infrastructure", reason="the deadline has passed before the program's time was over")
        # A confining program tells a signal of what it confines by 128 more than its number.
        code = done.exit_code if not 128 < done.exit_code <= 128 + 64 else 128 - done.exit_code
        # Few confining programs tell the CPU time of what they confine; the signal does.
        cpu_s = max(done.cpu_s, job.limits.cpu_s) if code == -signal.SIGXCPU else done.cpu_s
        end, code = ended(done.cause or _cause(code, cpu_s, job.limits), code)
        stdout, files = (b"", _products(done.stdout)) if job.outputs else (done.stdout[: job.limits.output], {})
        stderr = done.stderr[len(_BEGUN) :][: max(0, job.limits.output - len(stdout))]
        return Ran(end, code, stdout, stderr, cpu_s, done.peak, files=files)


def _cause(code: int, cpu_s: float, limits: Limits) -> Cause:
    """The limit over which the kernel has killed a program, as far as it shows."""
    return "cpu" if code in (-signal.SIGKILL, -signal.SIGXCPU) and cpu_s >= _NEARLY * limits.cpu_s else ""


def _lay_out(folder: Path, files: Path, contents: Mapping[str, bytes]) -> None:
    folder.chmod(0o755)
    files.mkdir(mode=0o755)
    for name, content in contents.items():
        path = files / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(0o755)


def _script(job: Job) -> str:
    """The shell's part: files, limits, and the program."""
    limits = job.limits
    tasks = limits.processes + limits.threads + _OWN_TASKS
    cpu_s = math.ceil(limits.cpu_s)
    lines = [
        f"printf '\\001begun\\n' >&2; cp -R {SHOWN}/. {FOLDER} && cd {FOLDER} || exit 126",
        f"ulimit -c 0; ulimit -S -t {cpu_s}; ulimit -H -t {cpu_s + 1}",
        f"ulimit -n {limits.files}; ulimit -f {limits.disk >> 9}",
        f"ulimit -p {tasks} 2>/dev/null || ulimit -u {tasks}",
        f"ulimit -d {limits.memory >> 10}; ulimit -v {(limits.memory + limits.reserved) >> 10}",
    ]
    if not job.outputs:
        return "\n".join([*lines, 'exec "$@"'])
    names = " ".join(f"{shlex.quote(name[:-1])}*" if name.endswith("/*") else shlex.quote(name) for name in job.outputs)
    told = """printf '%s %s\\n' "$(wc -c <"$each")" "$each" && cat "$each\""""
    each = f'for each in {names}; do [ -f "$each" ] && [ ! -h "$each" ] && {told}; done'
    return "\n".join([*lines, '"$@" >&2', "code=$?", each, "exit $code"])


def _products(output: bytes) -> dict[str, bytes]:
    """Files as the script writes them; without those that are not there to their end."""
    files = {}
    while output:
        head, _, output = output.partition(b"\n")
        size, _, name = head.partition(b" ")
        if not size.isdigit() or int(size) > len(output):
            break
        files[name.decode(errors="replace")] = output[: int(size)]
        output = output[int(size) :]
    return files
