"""One worker process, seen from its owner.

Invariants
  * The process leads a process group of its own, which is killed whole. Descendants that have left the group are killed
    with it.
  * It has the owner's view of the file system and of Python's path, and nothing of its memory. It is no fork of a
    process with threads. A join string in the owner's environment does not reach it, nor what its functions start.
  * The kernel kills it when its owner dies. Once `end` has returned, it is reaped and its descriptors are closed.
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
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any, cast

import msgpack
import psutil

from rollmesh.mesh.config.variables import without_settings
from rollmesh.mesh.errors import RewardError
from rollmesh.mesh.liveness.process_ends import descendants, signal_name, survivors
from rollmesh.mesh.runtime.die_with_parent import die_with_parent
from rollmesh.mesh.runtime.log_format import present_settings
from rollmesh.mesh.runtime.threads import thread_environment
from rollmesh.reward_service.function_kind import FunctionKind
from rollmesh.reward_service.outcomes import Outcome
from rollmesh.reward_service.workers.messages import DONE, MESSAGE_BYTES, READY, pack, unpack_answer, unpacker
from rollmesh.reward_service.workers.shared_page import SharedPage

# Unit, and its outcomes; None where it was not begun.
Answer = tuple[int, list[Outcome] | None]
# The path comes first: the package itself may be found by it alone.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from rollmesh.reward_service.workers.program import main; main()"
)
# Seconds for loading the functions; a reward model on a slow disk is among them.
_LOAD_S = 150.0
# Seconds for a worker without work to end by itself when it is hung up on.
_LEAVE_S = 1.0


@dataclass(frozen=True, slots=True)
class Ending:
    """End of a process.

    Attributes:
        code: its exit code, or a signal's negative number.
        killed: it was alive when we ended it.
        unit: the one it was busy with; None where it lived, and may have begun others since.
        nonsense: it wrote something that is no answer.
    """

    code: int
    killed: bool
    unit: int | None
    nonsense: bool = False

    @property
    def description(self) -> str:
        """The description of this end."""
        if self.nonsense:
            return "it wrote something that is not an answer"
        if self.killed:
            return "it had closed its connection"
        return f"exit code {self.code}" if self.code >= 0 else f"signal {signal_name(-self.code)}"

    @property
    def from_outside(self) -> bool:
        """True if it was ended from outside: by a user, or by a kernel that needs memory."""
        return not (self.killed or self.nonsense) and self.code in (-signal.SIGKILL, -signal.SIGTERM)


def _start_program(fds: tuple[int, ...]) -> subprocess.Popen[bytes]:
    """Starts the program, from the event loop's own thread.

    To the kernel an owner is dead as soon as the thread that started the process has ended.
    """
    return subprocess.Popen(
        die_with_parent([sys.executable, "-c", _PROGRAM, json.dumps(sys.path), *map(str, fds)]),
        stdin=subprocess.DEVNULL,
        pass_fds=fds,
        start_new_session=True,
        env={**without_settings(os.environ), **thread_environment(1)},
    )


class WorkerProcess(asyncio.Protocol):
    """A worker from its start to its end. All of it belongs to one event loop.

    Attributes:
        page: shows the unit it is busy with.
        on_event: called when answers have come or the connection has ended.
    """

    def __init__(self, process: subprocess.Popen[bytes], page: SharedPage, names: Sequence[str]) -> None:
        self.page = page
        self.on_event: Callable[[], None] = lambda: None
        self._process = process
        self._stream = unpacker(MESSAGE_BYTES)
        self._answers: list[Answer] = []
        self._names = names
        self._reply: list[Any] | None = None
        self._replied = asyncio.Event()
        self._transport: asyncio.WriteTransport | None = None
        self._lost = asyncio.Event()
        self._nonsense = False
        self._ending: Ending | None = None

    @classmethod
    async def open(
        cls, functions: Sequence[tuple[str, str]], call_timeout_s: float, *, tested: bool
    ) -> tuple[WorkerProcess, list[FunctionKind]]:
        """A worker that has loaded functions, given as (name in the configuration, name for errors), and their kinds.

        Args:
            functions: as above.
            call_timeout_s: seconds that one call may take.
            tested: another worker has loaded the same, and graded what scorers are tested with.

        Raises:
            RewardError: no process can be started, or it cannot load them, dies over it, or takes too long.
        """
        try:
            worker = await cls._spawn([name for _, name in functions])
        except OSError as error:
            raise RewardError(f"no reward worker can be started: {error}") from error
        settings = astuple(present_settings())
        worker.send([[list(function) for function in functions], tested, call_timeout_s, settings])
        try:
            return worker, await worker._wait_until_loaded()
        except BaseException:
            await worker.end()
            raise

    @classmethod
    async def _spawn(cls, names: Sequence[str]) -> WorkerProcess:
        ours, theirs = socket.socketpair()
        page, page_fd = SharedPage.create()
        fds = (theirs.fileno(), page_fd)
        try:
            process = _start_program(fds)
        except OSError:
            ours.close()
            page.close()
            raise
        finally:
            theirs.close()
            os.close(page_fd)
        ours.setblocking(False)
        worker = cls(process, page, names)
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: worker, sock=ours)
        except BaseException:
            ours.close()
            await worker.end()
            raise
        return worker

    @property
    def pid(self) -> int:
        """Id of the process and of its process group."""
        return self._process.pid

    @property
    def lost(self) -> bool:
        """True once the connection has ended: the process has ended, or cannot answer any more."""
        return self._lost.is_set()

    def send(self, message: Any) -> None:
        """Sends a message; does nothing if the worker is lost."""
        if self._transport is not None and not self.lost:
            self._transport.write(pack(message))

    def read_answers(self) -> list[Answer]:
        """The answers that have come since."""
        answers, self._answers = self._answers, []
        return answers

    async def end(self, *, at_once: bool = True) -> Ending:
        """Ends the process and all of its group, and waits for the end; a second call returns the same ending.

        Args:
            at_once: by SIGKILL; else it is hung up on and given a moment to leave.
        """
        lost = self.lost
        if self._transport is not None:
            self._transport.abort()
        if self._ending is None:
            patience_s = _LEAVE_S if (lost and not self._nonsense) or not at_once else 0.0
            reaped = asyncio.get_running_loop().run_in_executor(None, self._reap, patience_s)
            code, killed = await asyncio.shield(reaped)
            unit = None if killed or self._nonsense else self.page.unit
            self._ending = Ending(code, killed, unit, self._nonsense)
            self.page.close()
        return self._ending

    async def _wait_until_loaded(self) -> list[FunctionKind]:
        names = ", ".join(self._names)
        try:
            async with asyncio.timeout(_LOAD_S):
                await self._replied.wait()
        except TimeoutError:
            raise RewardError(
                f"a reward worker has not loaded {names} within {_LOAD_S:g} s",
                hint="importing the module must end",
            ) from None
        if self._reply is None:
            ending = await self.end()
            raise RewardError(
                f"a reward worker ended while it loaded {names}: {ending.description}",
                hint="a module must not end the process that imports it; what it printed is in the service's log",
            )
        kind, *arguments = self._reply
        if kind != READY:
            raise RewardError(arguments[0], hint=arguments[1])
        return [FunctionKind(*values) for values in arguments[0]]

    def _reap(self, patience_s: float) -> tuple[int, bool]:
        """Reaps the process, in a thread: waits for its own end, kills the group while its leader holds the number.

        A descendant that leaves the group and outlives a process that ends by itself is not found.

        Returns:
            the exit code, and whether the process was alive when it was killed.
        """
        killed = bool(survivors([self._process.pid], patience_s))
        below = descendants(self._process.pid) if killed else []
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for process in below:
            with contextlib.suppress(psutil.Error):
                process.kill()
        return self._process.wait(), killed

    # ------------------------------------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        try:
            self._stream.feed(data)
            for message in self._stream:
                self._accept_message(message)
        except (ValueError, TypeError, AttributeError, msgpack.UnpackException):  # it writes nonsense, or too much
            self._nonsense = True
            self._on_lost()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  # the base's signature
        """Called by the event loop."""
        self._on_lost()

    def _accept_message(self, message: Any) -> None:
        kind, *arguments = message
        if kind != DONE:
            if self._reply is not None:
                raise ValueError(f"no answer: {kind!r}")
            self._reply = message
            self._replied.set()
            return
        (answers,) = arguments
        for unit, answer in answers:
            if not isinstance(unit, int):
                raise TypeError(f"no unit: {unit!r}")
            self._answers.append((unit, None if answer is None else unpack_answer(answer)))
        self.on_event()

    def _on_lost(self) -> None:
        self._lost.set()
        self._replied.set()
        self.on_event()
