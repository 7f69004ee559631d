"""Reports a run that stalls: in the log, in `RUN/stalls.jsonl`, in heartbeats, and at last by its end.

Leases are named again by their holders every third of a term (`buffer.lease_s`), and what no one names is given back.
So a holder that is named here is alive and holds its groups.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

from rollmesh.buffer.client.client import BufferClient
from rollmesh.learner.control_requests import ControlRequests
from rollmesh.learner.liveness.stall_detector import LimitExceeded, MeshObservation, StallDetector, Stalled, StallEnded
from rollmesh.learner.status import LearnerStatus
from rollmesh.mesh.errors import RollmeshError, StalledError
from rollmesh.mesh.lease_holders import NAMED, describe_holders
from rollmesh.protos import buffer_pb2

_log = logging.getLogger(__name__)
FILE = "stalls.jsonl"
_HINT = "the logs of those named say more; where such waits are in order, raise buffer.stall_limit_s"


class StallReporter:
    """Observes the mesh once per description of the table `train`.

    Args:
        client: of the buffer.
        status, controls: of this learner.
        folder: of the run.
        stall_s, limit_s: see `learner.liveness.stall_detector`.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        client: BufferClient,
        status: LearnerStatus,
        controls: ControlRequests,
        folder: Path,
        *,
        stall_s: float,
        limit_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._status = status
        self._controls = controls
        self._path = folder / FILE
        self._watchdog = StallDetector(stall_s=stall_s, limit_s=limit_s)
        self._limit_s = limit_s
        self._clock = clock
        self._over = False

    def gauges(self) -> dict[str, float]:
        """For heartbeats and Prometheus: the present stall, and all of this learner's."""
        dog = self._watchdog
        return {
            "stalled_seconds": dog.stalled_s,
            "stalled_seconds_total": dog.total_s,
            "stalls_total": float(dog.stalls),
        }

    async def observe(self, table: buffer_pb2.DescribeResponse) -> None:
        """Observes a description of the table."""
        told = self._watchdog.observe(
            MeshObservation(
                now_s=self._clock(),
                moved=table.moved_unix_ms,
                tokens=table.sampled_tokens,
                handovers=table.counts.readmissions,
                waits=self._status.phase == "waiting_for_groups",
                loading=bool(table.generators_loading) and not table.generators_serving,
            )
        )
        match told:
            case Stalled():
                await self._stalled(told, table)
            case StallEnded():
                _log.warning("groups move again after %.0f s", told.seconds)
                await self._keep("over", told.seconds, "tokens are sampled" if told.by_tokens else "groups move again")
            case LimitExceeded():
                await self._exceeded(told, table)

    async def close(self) -> None:
        """Notes a stall that lasts while the learner ends."""
        if self._watchdog.stalled_s and not self._over:
            await self._keep("over", self._watchdog.stalled_s, "the learner ended")

    async def _stalled(self, told: Stalled, table: buffer_pb2.DescribeResponse) -> None:
        why = await self._held(table)
        _log.warning("nothing has moved for %.0f s: %s", told.seconds, why)
        await self._keep("begins" if told.begins else "lasts", told.seconds, why)

    async def _exceeded(self, told: LimitExceeded, table: buffer_pb2.DescribeResponse) -> None:
        self._over = True
        await self._keep("over", told.seconds, "the run ended: buffer.stall_limit_s was reached")
        self._controls.fail(
            StalledError(
                f"nothing has moved for {told.seconds:.0f} s (buffer.stall_limit_s: {self._limit_s:g}): "
                f"{await self._held(table)}",
                hint=_HINT if table.generators else "start one: `rollmesh generator --mesh ADDRESS`",
            )
        )

    async def _held(self, table: buffer_pb2.DescribeResponse) -> str:
        """The holders of groups in words; a stall is also reported where the buffer does not name them."""
        try:
            return describe_holders(table, await self._client.holders("train", NAMED))
        except RollmeshError as error:
            return f"who holds groups is not known: {error.message}"

    async def _keep(self, event: str, seconds: float, text: str) -> None:
        record = {"time": round(time.time(), 3), "event": event, "seconds": round(seconds, 3), "text": text}
        await asyncio.to_thread(_append, self._path, json.dumps(record) + "\n")


def _append(path: Path, line: str) -> None:
    """A full disk is reported, not raised: it must not end the run."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line)
    except OSError as error:
        _log.warning("%s not written: %s", path, error.strerror or error)
