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


class ProbeAnswer(enum.Enum):
    """The outcome of a question."""

    WELL = "well"
    """The process has answered."""
    PORT_CLOSED = "port closed"
    """The system answered in its place: no one listens there."""
    NONE = "none"
    """The question was lost: with a connection, or with a watcher that was away."""


async def wait_until_frozen(
    read_state: Callable[[], ProcessState | None], ask: Callable[[], Awaitable[ProbeAnswer]], bounds: Bounds
) -> Frozen:
    """Returns when a process is frozen; to be cancelled when it has ended.

    Args:
        read_state: the state of the process that answers; None: it is not known, and nothing counts.
        ask: asks once, without a deadline.
        bounds: the bounds of its silence.
    """
    detector, clock = FreezeDetector(bounds), asyncio.get_running_loop().time

    def judge_silence(*, port_closed: bool = False) -> Frozen | None:
        process = read_state()
        return detector.observe_silence(clock(), process, port_closed=port_closed) if process is not None else None

    while True:
        asking = asyncio.ensure_future(ask())
        try:
            while not (await asyncio.wait({asking}, timeout=bounds.poll_s))[0]:
                if verdict := judge_silence():
                    return verdict
            answer = asking.result()
        finally:
            asking.cancel()
        if answer is ProbeAnswer.WELL:
            detector.observe_answer()
            await asyncio.sleep(ASK_EVERY_S)
            continue
        if verdict := judge_silence(port_closed=answer is ProbeAnswer.PORT_CLOSED):
            return verdict
        await asyncio.sleep(bounds.poll_s)
