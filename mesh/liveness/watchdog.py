"""Asks a process whether it is well, again and again, until it is frozen.

Invariants: one question at a time, and it has no deadline: an answer counts however late it comes. `/proc` is read
only while an answer is owed, so that watching a healthy process costs one small call every `ASK_EVERY_S`.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable

from rollmesh.mesh.liveness.freeze_detector import Bounds, FreezeDetector, Frozen, ProcessState

# Pause between an answer and the next question, in seconds.
ASK_EVERY_S = 2.0


class Answer(enum.Enum):
    """What became of a question."""

    WELL = "well"
    """It has answered."""
    PORT_CLOSED = "port closed"
    """The system answered in its place: no one listens there."""
    NONE = "none"
    """The question was lost: with a connection, or with a watcher that was away."""


async def wait_until_frozen(
    look: Callable[[], ProcessState | None], ask: Callable[[], Awaitable[Answer]], bounds: Bounds
) -> Frozen:
    """Returns when a process is frozen; to be cancelled when it has ended.

    Args:
        look: at the process that answers; None: nothing is said of it, and nothing counts.
        ask: asks once; may take as long as it takes.
        bounds: of silence.
    """
    detector, clock = FreezeDetector(bounds), asyncio.get_running_loop().time

    def silent(*, port_closed: bool = False) -> Frozen | None:
        sight = look()
        return detector.silent(clock(), sight, port_closed=port_closed) if sight is not None else None

    while True:
        asking = asyncio.ensure_future(ask())
        try:
            while not (await asyncio.wait({asking}, timeout=bounds.look_s))[0]:
                if verdict := silent():
                    return verdict
            answer = asking.result()
        finally:
            asking.cancel()
        if answer is Answer.WELL:
            detector.answered()
            await asyncio.sleep(ASK_EVERY_S)
            continue
        if verdict := silent(port_closed=answer is Answer.PORT_CLOSED):
            return verdict
        await asyncio.sleep(bounds.look_s)
