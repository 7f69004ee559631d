"""The frame of every service process: event loop, signals, health, reflection, ready file, exit code.

Invariants: SIGTERM and SIGINT ask for a graceful end (`Shutdown.requested`), a second one ends at once. An expected
failure ends the process with one log line and the error's exit code, never with a traceback as the message.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import grpc
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rollmesh.mesh.errors import RollmeshError
from rollmesh.mesh.files import write_atomically
from rollmesh.mesh.runtime.log_format import LogSettings, setup_logging

log = logging.getLogger(__name__)


class Shutdown:
    """The wish to end, settable from signals, RPCs and the service itself."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.reason = ""

    def request(self, reason: str) -> None:
        """Asks for a graceful end; the first reason stays."""
        if not self.requested.is_set():
            self.reason = reason
            self.requested.set()

    async def run_until_requested(self, work: Coroutine[Any, Any, None]) -> bool:
        """Runs work to its end, or cancels it once shutdown is requested; returns whether the work is done."""
        working, asked = asyncio.ensure_future(work), asyncio.ensure_future(self.requested.wait())
        try:
            await asyncio.wait({working, asked}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                return False
            working.result()
            return True
        finally:
            working.cancel()
            asked.cancel()
            await asyncio.gather(working, asked, return_exceptions=True)


def run_service(name: str, main: Callable[[Shutdown], Awaitable[int]], *, settings: LogSettings | None = None) -> int:
    """Runs a service's coroutine to its end and returns the process exit code; `settings` are those of its log."""
    setup_logging(name, settings)

    async def supervised() -> int:
        shutdown = Shutdown()
        loop = asyncio.get_running_loop()

        def on_signal(number: signal.Signals) -> None:
            if shutdown.requested.is_set():
                os._exit(128 + number)
            log.info("asked to end by %s", number.name)
            shutdown.request(number.name)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal, number)
        return await main(shutdown)

    try:
        return uvloop.run(supervised())
    except RollmeshError as error:
        log.error("%s", error, extra={"code": error.code})
        return error.exit_code


def add_health_and_reflection(server: grpc.aio.Server, service_names: Sequence[str]) -> health.aio.HealthServicer:
    """Adds the standard health and reflection services; every service starts as SERVING once the server runs."""
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    names = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    return servicer


async def set_serving(servicer: health.aio.HealthServicer, service_names: Sequence[str]) -> None:
    """Reports the overall state and each named service as serving."""
    for name in ("", *service_names):
        await servicer.set(name, health_pb2.HealthCheckResponse.SERVING)


def write_ready_file(path: Path | None, address: str) -> None:
    """Reports to a waiting parent, atomically, that the service answers at `address`."""
    if path is not None:
        write_atomically(path, json.dumps({"address": address, "pid": os.getpid()}))


def advertised_address(host: str, port: int, advertise: str | None) -> str:
    """host:port under which others reach a service bound to `host`."""
    if advertise:
        return advertise if ":" in advertise else f"{advertise}:{port}"
    if host in ("0.0.0.0", "::", "[::]"):  # noqa: S104  compared, not bound
        return f"{socket.gethostname()}:{port}"
    return f"{host}:{port}"


async def end_task(task: asyncio.Task[Any], again_s: float = 1.0) -> None:
    """Cancels a task and waits for its end; again and again, for a library may take a cancellation for its own.

    Args:
        again_s: seconds that it gets each time.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=again_s)
