"""The time that a service gets to end in order, and the work for which it gets more. The clock is pure.

Invariants: a service that says that it works on what would be lost is waited for, as long as its own deadlines allow.
Without such work, or without an answer, its time runs. Work that it names starts that time again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc

from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import RollmeshError
from rollmesh.mesh.rpc.channel import open_channel
from rollmesh.protos import learner_pb2, learner_pb2_grpc

_ASK_EVERY_S = 2.0
_ANSWER_S = 5.0
# Others are over as soon as a learner hears that it should end, or nothing is lost with them.
_LEARNER_WORK = frozenset({"training", "publishing", "swapping", "checkpointing", "exporting", "ending"})


@dataclass(frozen=True, slots=True)
class FinalWork:
    """Work that a service finishes after it was asked to end.

    Attributes:
        read_phase: gives the present work of a service at an address, in words; empty: none for which to wait.
        most_s: longest wait for it in all, in seconds.
    """

    read_phase: Callable[[str, SecuritySection], Awaitable[str]]
    most_s: float


class DrainClock:
    """Decides when a service that was asked to end has had its time.

    Args:
        now: of a monotonic clock, when it was asked, in seconds.
        idle_s: seconds that it gets without work.
        work_s: seconds for which its work may put that off.
    """

    def __init__(self, now: float, *, idle_s: float, work_s: float = 0.0) -> None:
        self._idle_s = idle_s
        self._work_until = now + work_s
        self._idle_since = self._asked_at = now
        self._work = ""

    def observe(self, now: float, work: str) -> bool:
        """Takes an answer, the service's work in words or nothing; True where it is other work than before."""
        if not work:
            return False
        self._idle_since = min(now, self._work_until)
        before, self._work = self._work, work
        return work != before

    def pause_s(self, now: float) -> float:
        """Seconds until it is to be asked again; 0 once its time is over."""
        return max(0.0, min(_ASK_EVERY_S, self._idle_since + self._idle_s - now))

    def overdue(self, now: float) -> str:
        """The end of its time, in words."""
        if not self._work:
            return f"did not end within {self._idle_s:.0f} s of being asked to, killed"
        return f"did not end within {now - self._asked_at:.0f} s of being asked to (last: {self._work}), killed"


async def learner_work(address: str, security: SecuritySection) -> str:
    """The work of a learner that should be waited for, in words; empty without any, and where it does not answer."""
    try:
        async with open_channel(address, security) as channel:
            status: learner_pb2.LearnerStatusResponse = await learner_pb2_grpc.LearnerControlStub(channel).Status(
                learner_pb2.LearnerStatusRequest(), timeout=_ANSWER_S
            )
    except (RollmeshError, grpc.aio.AioRpcError):
        return ""
    return (status.reason or status.phase) if status.phase in _LEARNER_WORK else ""
