"""Messages between the process that measures and those that it has started."""

from __future__ import annotations

import asyncio
import os
from multiprocessing.connection import Connection
from typing import Any

from rollmesh.mesh.errors import RollmeshError


class MeasurementError(RollmeshError):
    """A process of the measured system failed."""

    code = "measurement"


async def receive(conn: Connection) -> Any:
    """The parent's next message, in an event loop that has other things to do."""
    loop, heard = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(conn.fileno(), heard.set)
    try:
        await heard.wait()
    finally:
        loop.remove_reader(conn.fileno())
        # The loop made it non-blocking; what is sent over it may be large.
        os.set_blocking(conn.fileno(), True)
    return conn.recv()


def answer_of(conn: Connection, what: str, timeout_s: float) -> Any:
    """A process' answer.

    Raises:
        MeasurementError: it does not come in time, or the process has ended.
    """
    if not conn.poll(timeout_s):
        raise MeasurementError(f"{what}: no answer for {timeout_s:.0f} s")
    try:
        return conn.recv()
    except (EOFError, ConnectionError) as error:
        raise MeasurementError(f"{what}: the process has ended", hint="its traceback is on the terminal") from error
