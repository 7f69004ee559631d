"""The frame of every service process: event loop, signals, health, reflection, ready file, exit code.

Invariants: SIGTERM and SIGINT ask for a graceful end (`Shutdown.requested`), see `end_signals`. An expected failure
ends the process with one log line and the error's exit code, never with a traceback as the message.
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

from rollmesh.mesh.addresses import host_of, is_unspecified, join_address, with_port
from rollmesh.mesh.errors import RollmeshError
from rollmesh.mesh.files import write_atomically
from rollmesh.mesh.runtime.end_signals import EndSignals, end_signals
from rollmesh.mesh.runtime.hosts import is_loopback, own_address_to
from rollmesh.mesh.runtime.log_format import LogSettings, setup_logging

log = logging.getLogger(__name__)


class Shutdown:
    """The wish to end, settable from signals, RPCs and the service itself.

    Attributes:
        requested: set once the end is asked for.
        reason: why; empty before that.
        within_s: seconds after which the process is gone in any case; None where it is not known.
    """

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.reason = ""
        self.within_s: float | None = None

    def request(self, reason: str, within_s: float | None = None) -> None:
        """Asks for a graceful end; the first reason and its time stay."""
        if not self.requested.is_set():
            self.reason = reason
            self.within_s = within_s
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
        signals = EndSignals()

        def on_signal(number: signal.Signals) -> None:
            if signals.is_first(number):
                shutdown.request(number.name)

        for number in end_signals():
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


def advertised_address(host: str, port: int, advertise: str | None, *, mesh: str = "") -> str:
    """`host:port` under which others reach a service.

    Args:
        host, port: that it has bound.
        advertise: as the configuration says: a host, or `host:port` where a router passes on another port.
        mesh: address of a front; a service on all addresses is reached by the one that faces it.
    """
    if advertise:
        return with_port(advertise, port)
    if is_unspecified(host):
        facing = own_address_to(host_of(mesh.partition(",")[0])) if mesh else None
        return join_address(facing if facing and not is_loopback(facing) else socket.gethostname(), port)
    return join_address(host, port)


async def end_task(task: asyncio.Task[Any], again_s: float = 1.0) -> None:
    """Cancels a task and waits for its end; again and again, for a library may take a cancellation for its own.

    Args:
        again_s: seconds that it gets each time.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=again_s)
