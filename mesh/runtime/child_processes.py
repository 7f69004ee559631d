"""Child processes of programs with threads.

uvloop's own way to start one runs Python between fork and exec: handlers after a fork, and the end of other threads'
local data. Where that belongs to a library in C, the child crashes before it is the command. `subprocess` runs nothing
there.

Invariants:
- nothing of this program runs in a child that is started here; it has its standard streams alone;
- whatever hides the end of a child, also a forked one (`fork_server`), is an error of its wait and not a wait for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import IO

from rollmesh.mesh.runtime.fork_server.forked import ForkedProcess


class Child:
    """A process that was started; in one event loop.

    Args:
        process: which no one else waits for.
        stdin, stdout: its pipes, where there are some.

    Attributes:
        stdin, stdout: its pipes, where they were asked for.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes] | ForkedProcess,
        stdin: asyncio.StreamWriter | None = None,
        stdout: asyncio.StreamReader | None = None,
    ) -> None:
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self.stdin = stdin
        self.stdout = stdout
        # One thread each: asyncio's few threads must stay free for work that ends.
        threading.Thread(target=self._watch, name=f"waits for process {process.pid}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status, or the negative number of the signal that has ended it; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Waits for the end; returns the exit status, or the negative number of the signal that has ended it.

        Raises:
            OSError: its end cannot be seen.
        """
        return await asyncio.shield(self._ended)

    def terminate(self) -> None:
        """Asks it to end; one that has ended stays as it is."""
        self._process.terminate()

    def kill(self) -> None:
        """Ends it at once; one that has ended stays as it is."""
        self._process.kill()

    def _watch(self) -> None:
        settle: Callable[[], None]
        try:
            settle = partial(self._ended.set_result, self._process.wait())
        except BaseException as error:  # noqa: BLE001  # whatever it is, someone waits for this
            settle = partial(self._ended.set_exception, error)
        # The loop may be over before the process.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(settle)


async def start_process(
    command: Sequence[str],
    *,
    stdin: int | None = None,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
    env: Mapping[str, str] | None = None,
    start_new_session: bool = False,
) -> Child:
    """Starts a command; arguments as those of `subprocess.Popen`.

    Raises:
        OSError: it cannot be started.
    """
    process = subprocess.Popen(  # noqa: ASYNC220  # it returns once the kernel has the command
        list(command),
        bufsize=0,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env=env,
        start_new_session=start_new_session,
    )
    writer = await _writer(process.stdin) if process.stdin is not None else None
    reader = await _reader(process.stdout) if process.stdout is not None else None
    return Child(process, writer, reader)


async def _writer(pipe: IO[bytes]) -> asyncio.StreamWriter:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, protocol = await loop.connect_write_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return asyncio.StreamWriter(transport, protocol, reader, loop)


async def _reader(pipe: IO[bytes]) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return reader
