"""The server is killed in the middle of a call, and started again. Only with a command that starts it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress

from rollmesh.mesh.errors import ConfigError
from rollmesh.reward_service.conformance.session import Session
from rollmesh.reward_service.conformance.transport import CallError, Transport

KILL = "restart.kill"
# Seconds that a server may take to start.
_START_S = 60.0


class ServerProcess:
    """A server that the kit starts, with all processes that it starts itself."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self, transport: Transport) -> None:
        """Starts it, and waits until it can be reached.

        Raises:
            ConfigError: a command that cannot be executed.
            CallError: it cannot be reached in time, or has ended.
        """
        try:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - it only forks, and is waited for by its port
                self._command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            raise ConfigError(f"restart command: {error}", hint="give a program and its arguments") from error
        until = time.monotonic() + _START_S
        while True:
            try:
                return await self._connect(transport)
            except CallError:
                if self._process.poll() is not None:
                    status = self._process.returncode
                    raise CallError("unavailable", "ended", f"the command ended with status {status}") from None
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(0.05)

    async def _connect(self, transport: Transport) -> None:
        """Waits for a second until it can be reached, and no longer than it lives."""
        assert self._process is not None
        connecting = asyncio.create_task(transport.connect(1.0))
        try:
            while not connecting.done() and self._process.poll() is None:
                await asyncio.wait((connecting,), timeout=0.05)
        finally:
            connecting.cancel()
        await asyncio.wait((connecting,))
        if connecting.cancelled():
            raise CallError("unavailable", "ended", "the command has ended")
        connecting.result()

    def kill(self) -> None:
        """Kills it, and all that it has started."""
        if self._process is not None:
            with suppress(ProcessLookupError):  # It has ended by itself.
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


async def kill(session: Session, process: ServerProcess) -> None:
    """A killed server comes back by its command, with the same scores."""
    items = session.samples[: session.most(len(session.samples))]
    before = (await session.call(items)).totals
    call = asyncio.create_task(session.call(session.many(session.most(256), "killed")))
    await asyncio.sleep(min(0.05, session.seconds))
    process.kill()
    await call
    try:
        await process.start(session.transport)
    except CallError as error:
        remedy = "let go of the port at once (SO_REUSEADDR), and need nothing that a killed process leaves behind"
        session.find("error", KILL, f"killed in a call, it did not come back: {error}", remedy)
        return
    after = (await session.call(items, probe=KILL)).totals
    if session.is_repeatable and before != after:
        session.find("error", KILL, "killed and started again, it scores otherwise", "keep no state that scores need")
