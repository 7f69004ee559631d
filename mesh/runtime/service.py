"""The frame of every service process: event loop, signals, health, reflection, ready file, exit code.

Invariants: SIGTERM and SIGINT ask for a graceful end (`Shutdown.requested`), a second one ends at once; an expected
failure ends the process with one log line and the error's exit code, never with a traceback as the message.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rollmesh.mesh.errors import RollmeshError, UnreachableError
from rollmesh.mesh.runtime.log_format import setup_logging

log = logging.getLogger(__name__)
T = TypeVar("T")


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

    async def before(self, work: Coroutine[Any, Any, None]) -> bool:
        """Does work unless the end is asked for first; then the work is cancelled. Whether it is done."""
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


def run_service(name: str, main: Callable[[Shutdown], Awaitable[int]], *, level: str = "info") -> int:
    """Runs a service's coroutine to its end and returns the process exit code."""
    setup_logging(name, level)

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
    """Tells a waiting parent, atomically, that the service answers at `address`."""
    if path is None:
        return
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    scratch.write_text(json.dumps({"address": address, "pid": os.getpid()}), encoding="utf-8")
    scratch.replace(path)


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


class AsyncBridge:
    """An event loop in a thread of its own, for programs whose main thread computes.

    Every call has a deadline; errors arrive as they were raised.
    """

    def __init__(self, name: str = "rpc") -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Starts a coroutine and returns at once."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Runs a coroutine and waits for its result; see `result`."""
        return self.result(self.submit(coroutine), timeout_s)

    def result(self, submitted: concurrent.futures.Future[T], timeout_s: float) -> T:
        """Waits for the result of what `submit` has started.

        Raises:
            UnreachableError: there is none after `timeout_s`; the coroutine is cancelled.
        """
        done, _ = concurrent.futures.wait([submitted], timeout_s)
        if not done:
            submitted.cancel()
            raise UnreachableError(
                f"no result from the mesh within {timeout_s:.0f} s", hint="`rollmesh status` says who answers"
            )
        return submitted.result()

    def close(self) -> None:
        """Cancels what still runs and ends the thread."""

        async def cancel_all() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.submit(cancel_all()).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
