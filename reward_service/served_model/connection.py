"""One process of a judging model, seen from its owner: started, spoken to, ended.

Invariants: it leads a process group of its own, which is killed whole. The kernel kills it when the thread that started
it ends. Once `end` has returned, it is reaped.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, astuple
from typing import Any, cast

import msgpack

from rollmesh.mesh.config.variables import without_settings
from rollmesh.mesh.errors import RewardError
from rollmesh.mesh.runtime.die_with_parent import die_with_parent
from rollmesh.mesh.runtime.log_format import present_settings
from rollmesh.mesh.runtime.threads import thread_environment
from rollmesh.reward_service.served_model.messages import MESSAGE_BYTES, READY, ModelOptions

# The path comes first: the package itself may be found by it alone.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from rollmesh.reward_service.served_model.program import main; main()"
)
# Seconds for loading a model; a large one on a slow disk is among them.
_LOAD_S = 900.0


def _start(fd: int) -> subprocess.Popen[bytes]:
    """Starts the program, from the event loop's own thread.

    To the kernel an owner is dead as soon as the thread that started the process has ended.
    """
    return subprocess.Popen(
        die_with_parent([sys.executable, "-c", _PROGRAM, json.dumps(sys.path), str(fd)]),
        stdin=subprocess.DEVNULL,
        pass_fds=(fd,),
        start_new_session=True,
        env={**without_settings(os.environ), **thread_environment(1)},
    )


class ModelConnection(asyncio.Protocol):
    """A process from its start to its end. All of it belongs to one event loop.

    Attributes:
        lost: set once the process has ended, or writes nonsense.
    """

    def __init__(self, process: subprocess.Popen[bytes], on_message: Callable[[list[Any]], None]) -> None:
        self.lost = asyncio.Event()
        self._process = process
        self._on_message = on_message
        self._stream = msgpack.Unpacker(max_buffer_size=MESSAGE_BYTES)
        self._first: asyncio.Future[list[Any] | None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.WriteTransport | None = None

    @classmethod
    async def open(cls, options: ModelOptions, on_message: Callable[[list[Any]], None]) -> ModelConnection:
        """A process that has loaded its model.

        Args:
            on_message: takes each later message.

        Raises:
            RewardError: it cannot be started, refuses, ends, or takes too long.
        """
        ours, theirs = socket.socketpair()
        try:
            process = _start(theirs.fileno())
        except OSError as error:
            ours.close()
            raise RewardError(f"no process for a reward model can be started: {error}") from error
        finally:
            theirs.close()
        ours.setblocking(False)
        connection = cls(process, on_message)
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: connection, sock=ours)
            connection.send(asdict(options), astuple(present_settings()))
            await connection._until_loaded(options)
        except BaseException:
            await connection.end()
            raise
        return connection

    @property
    def pid(self) -> int:
        """Id of the process and of its process group."""
        return self._process.pid

    def send(self, *message: Any) -> None:
        """Sends a message; does nothing if the process is lost."""
        if self._transport is not None and not self.lost.is_set():
            self._transport.write(msgpack.packb(message))

    async def end(self) -> int:
        """Kills the process and all of its group, and waits for the end; returns its exit code."""
        if self._transport is not None:
            self._transport.abort()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        reaped = asyncio.get_running_loop().run_in_executor(None, self._process.wait)
        return await asyncio.shield(reaped)

    async def _until_loaded(self, options: ModelOptions) -> None:
        try:
            async with asyncio.timeout(_LOAD_S):
                first = await self._first
        except TimeoutError:
            raise RewardError(f"reward model {options.folder} has not loaded within {_LOAD_S:g} s") from None
        if first is None:
            raise RewardError(
                f"the process of reward model {options.folder} ended while it loaded",
                hint="what it printed is in the service's log; memory is the usual reason",
            )
        kind, *arguments = first
        if kind != READY:
            raise RewardError(arguments[0], hint=arguments[1])

    # ------------------------------------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        try:
            self._stream.feed(data)
            for message in self._stream:
                if self._first.done():
                    self._on_message(message)
                else:
                    self._first.set_result(message)
        except (ValueError, TypeError, LookupError, msgpack.UnpackException):  # it writes nonsense, or too much
            self._on_lost()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  # the base's signature
        """Called by the event loop."""
        self._on_lost()

    def _on_lost(self) -> None:
        self.lost.set()
        if not self._first.done():
            self._first.set_result(None)
