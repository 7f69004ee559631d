"""The server of a backend, started here and owned, or found at an address: its start, and the cause of its death.

Invariant: the key of a server that is started here goes to a process of that server alone. Its port is in command
lines, which all users of the host can read, long before it is bound.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.external.model_info import ModelInfo
from rollmesh.generators.engines.sglang import server_args, server_plugins
from rollmesh.generators.engines.sglang.http_client import HttpClient
from rollmesh.generators.engines.sglang.server_process import KILLED_BY, ServerProcess, StartProgress, free_port
from rollmesh.generators.engines.types import EngineSettings
from rollmesh.mesh.config.rollout import SglangSection
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.private_files import read_secret

log = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_ASK_EVERY_S = 0.05
_CONNECT_S = 10.0
# Seconds that a broken connection waits for the news that the server has died.
_CAUSE_S = 5.0


class PortTakenError(EngineError):
    """Another process listens where the server should."""


async def _is_open(port: int) -> bool:
    """True where a process listens at a loopback port; nothing is sent to it."""
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, writer = await asyncio.open_connection(_LOOPBACK, port)
    except OSError:
        return False
    writer.close()
    return True


class Server:
    """The server of one backend, in one event loop.

    Args:
        folder: of the model.
        model: as its folder describes it.
        settings, section: of the engine.
        adapters: arguments for adapters; None: it gets whole weights.
        on_death: called with the cause, once, of an unexpected death while `up` is set.

    Attributes:
        process: None where it was not started here.
        up: it is in use; before, its death is the failure of its start.
        death: the cause; empty while it lives.
    """

    def __init__(
        self,
        folder: Path,
        model: ModelInfo,
        settings: EngineSettings,
        section: SglangSection,
        adapters: Mapping[str, Any] | None,
        on_death: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._model = model
        self._settings = settings
        self._section = section
        self._adapters = adapters
        self._on_death = on_death
        self._client: HttpClient | None = None
        self._watch: asyncio.Task[None] | None = None
        self._leaving = False
        self.process: ServerProcess | None = None
        self.up = False
        self.death = ""

    @property
    def client(self) -> HttpClient:
        """The HTTP client of the server."""
        assert self._client is not None, "open() comes first"
        return self._client

    async def open(self) -> None:
        """Starts or finds it, and waits until it answers.

        Raises:
            ConfigError: it refuses its arguments, or its key cannot be read.
            EngineError: it has died, or the time is up.
        """
        address, key_file = self._section.address, self._section.key_file
        key = read_secret(key_file, "rollout.sglang.key_file") if key_file is not None else ""
        port = None
        if address is None:
            port, key = await self._launch()
            address = f"http://{_LOOPBACK}:{port}"
        self._client = HttpClient(address, self._cause, key)
        await self._until_ready(self._client, port)

    def report_death(self, cause: str) -> None:
        """Records that it has died, or answers no more."""
        if not self._leaving and not self.death:
            self.death = cause
            if self.up:
                self._on_death(cause)

    def expect_end(self) -> None:
        """Ignores its end from here on."""
        self._leaving = True
        if self._watch is not None:
            self._watch.cancel()

    async def close(self) -> None:
        """Ends all connections, and the server where it is ours. May be called twice, and during `open`."""
        self.expect_end()
        if self._client is not None:
            await self._client.close()
        if self.process is not None:
            await self.process.stop()

    async def _launch(self) -> tuple[int, str]:
        """Starts it; returns its port and its API key."""
        self.process = ServerProcess()
        port, key = free_port(), secrets.token_hex()
        command = server_args.command(
            server_args.model_folder(self._folder, self.process.scratch),
            self._settings,
            self._section,
            port=port,
            context=self._model.limits.context,
            vocabulary=self._model.limits.vocabulary,
            # Each start has its own: one that began the numbers again would repeat responses.
            seed=secrets.randbits(31),
            adapters=self._adapters,
        )
        command += server_args.with_key(key, self.process.scratch)
        log.info("starting an SGLang server: %s", " ".join(command))
        variables = server_args.environment(self._settings) | server_args.meeting(
            self._section, self.process.scratch, port
        )
        plugin = self.process.scratch / "grammars"
        if await asyncio.to_thread(server_plugins.write_grammars, self._model, plugin):
            variables["PYTHONPATH"] = f"{plugin}:{variables['PYTHONPATH']}".rstrip(":")
        await self.process.start(command, variables)
        self._watch = asyncio.create_task(self._watch_process(self.process))
        return port, key

    async def _watch_process(self, process: ServerProcess) -> None:
        self.report_death(await process.until_dead())

    async def _until_ready(self, client: HttpClient, port: int | None) -> None:
        """Polls until it answers; at `port` a server that is started here has to listen first."""
        progress = StartProgress(self.process) if self.process is not None else None
        end = time.monotonic() + self._section.start_timeout_s
        while not self.death:
            try:
                if port is None or await self._listens_at(port):
                    await client.get("/model_info", timeout_s=30.0)
                    return
                reason = "it does not listen yet"
            except PortTakenError:
                raise
            except EngineError as error:
                reason = str(error)
            if time.monotonic() > end:
                tail = f"; the end of its log:\n{self.process.tail()}" if self.process is not None else ""
                raise EngineError(
                    f"no SGLang server at {client.address} after {self._section.start_timeout_s:g} s: {reason}{tail}",
                    hint="rollout.sglang.start_timeout_s sets how long it may take",
                )
            if progress is not None:
                progress.log_if_due()
            await asyncio.sleep(_ASK_EVERY_S)
        if server_args.refuses_arguments(self.death):
            raise ConfigError(
                self.death, hint="rollout.sglang.options are its arguments, in addition to those that the run sets"
            )
        raise EngineError(self.death, hint=_hint(self.death))

    async def _listens_at(self, port: int) -> bool:
        """True where our server listens at its port; False where no process does.

        Raises:
            PortTakenError: another process does.
        """
        assert self.process is not None, "_launch() comes first"
        if not await _is_open(port):
            return False
        if await asyncio.to_thread(self.process.listens_at, port):
            return True
        # A server that has just died listens no more.
        if not await _is_open(port):
            return False
        raise PortTakenError(
            f"port {port} of {_LOOPBACK} is in use by another process, not by the SGLang server",
            hint="ss -ltnp shows which; a new start takes another port",
        )

    async def _cause(self) -> str:
        """The reason why a connection broke; empty where it is unknown."""
        if self.process is not None and self.up and not self.death and not self._leaving:
            with suppress(TimeoutError):
                return await asyncio.wait_for(self.process.until_dead(), _CAUSE_S)
        return self.death


def _hint(death: str) -> str:
    """The hint for a server that has died in its start."""
    if f"{KILLED_BY}SIGKILL" in death:
        return "the kernel's OOM killer ends processes this way where memory is short (dmesg tells)"
    if "No module named" in death and "sglang" in death:
        return "rollout.sglang.python names the interpreter of an environment with sglang in it (make sglang)"
    options = "rollout.sglang.options are passed to the server as they are"
    return f"see the log above; {options}" if "\n" in death else options
