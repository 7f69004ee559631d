"""Children under the event loop of the services."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import uvloop

from rollmesh.mesh.runtime.child_processes import Child, start_process

_DEADLINE_S = 240.0


def test_nothing_of_this_program_runs_in_a_child(tmp_path: Path) -> None:
    here = os.getpid()
    watching = True

    def told() -> None:
        if watching and os.getppid() == here:
            (tmp_path / "ran").touch()

    os.register_at_fork(after_in_child=told)

    async def start() -> int:
        return await (await start_process([sys.executable, "-c", "raise SystemExit(3)"])).wait()

    assert uvloop.run(asyncio.wait_for(start(), _DEADLINE_S)) == 3
    watching = False
    assert not list(tmp_path.iterdir())


def test_a_child_has_pipes_and_an_end() -> None:
    async def talk() -> None:
        child = await start_process(
            [sys.executable, "-c", "print(input()[::-1], flush=True); input()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(b"abc\n")
        await child.stdin.drain()
        assert await child.stdout.readline() == b"cba\n"
        assert os.getsid(child.pid) == child.pid
        child.kill()
        assert await child.wait() == -signal.SIGKILL
        assert await child.wait() == -signal.SIGKILL
        child.kill()
        child.stdin.close()

    uvloop.run(asyncio.wait_for(talk(), _DEADLINE_S))


def test_a_wait_that_fails_is_an_error_and_not_a_wait_for_ever() -> None:
    class Lost(subprocess.Popen[bytes]):
        def __init__(self) -> None:
            self.pid, self.returncode, self.args, self._child_created = 0, None, [], False

        def wait(self, timeout: float | None = None) -> int:
            raise ChildProcessError("no such child")

    async def wait() -> None:
        with pytest.raises(ChildProcessError):
            await Child(Lost()).wait()

    asyncio.run(asyncio.wait_for(wait(), _DEADLINE_S))


def test_a_command_that_is_not_there_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        uvloop.run(start_process(["/no/such/command"]))
