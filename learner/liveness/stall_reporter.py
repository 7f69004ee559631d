"""Reports a run that stalls: in the log, in `RUN/stalls.jsonl`, in heartbeats, and at last by its end.

Holders name their leases again every third of a term (`buffer.lease_s`), and leases that are not named are returned.
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
from rollmesh.mesh.tables import TRAIN
from rollmesh.protos import buffer_pb2

log = logging.getLogger(__name__)
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
        self._detector = StallDetector(stall_s=stall_s, limit_s=limit_s)
        self._limit_s = limit_s
        self._clock = clock
        self._over = False

    def gauges(self) -> dict[str, float]:
        """Gauges for heartbeats and Prometheus: the present stall, and all of this learner's."""
        detector = self._detector
        return {
            "stalled_seconds": detector.stalled_s,
            "stalled_seconds_total": detector.total_s,
            "stalls_total": float(detector.stalls),
        }

    async def observe(self, table: buffer_pb2.DescribeResponse) -> None:
        """Observes a description of the table."""
        event = self._detector.observe(
            MeshObservation(
                now_s=self._clock(),
                moved=table.moved_unix_ms,
                tokens=table.sampled_tokens,
                handovers=table.counts.readmissions,
                waits=self._status.phase == "waiting_for_groups",
                loading=bool(table.generators_loading) and not table.generators_serving,
            )
        )
        match event:
            case Stalled():
                await self._report_stall(event, table)
            case StallEnded():
                log.warning("groups move again after %.0f s", event.seconds)
                await self._append(
                    "over", event.seconds, "tokens are sampled" if event.by_tokens else "groups move again"
                )
            case LimitExceeded():
                await self._end_run(event, table)

    async def close(self) -> None:
        """Records a stall that lasts while the learner ends."""
        if self._detector.stalled_s and not self._over:
            await self._append("over", self._detector.stalled_s, "the learner ended")

    async def _report_stall(self, event: Stalled, table: buffer_pb2.DescribeResponse) -> None:
        why = await self._describe_holders(table)
        log.warning("nothing has moved for %.0f s: %s", event.seconds, why)
        await self._append("begins" if event.begins else "lasts", event.seconds, why)

    async def _end_run(self, event: LimitExceeded, table: buffer_pb2.DescribeResponse) -> None:
        self._over = True
        await self._append("over", event.seconds, "the run ended: buffer.stall_limit_s was reached")
        self._controls.fail(
            StalledError(
                f"nothing has moved for {event.seconds:.0f} s (buffer.stall_limit_s: {self._limit_s:g}): "
                f"{await self._describe_holders(table)}",
                hint=_HINT if table.generators else "start one: `rollmesh generator --mesh ADDRESS`",
            )
        )

    async def _describe_holders(self, table: buffer_pb2.DescribeResponse) -> str:
        """The holders of groups in words, or the reason why they are not known."""
        try:
            return describe_holders(table, await self._client.holders(TRAIN, NAMED))
        except RollmeshError as error:
            return f"who holds groups is not known: {error.message}"

    async def _append(self, kind: str, seconds: float, text: str) -> None:
        record = {"time": round(time.time(), 3), "event": kind, "seconds": round(seconds, 3), "text": text}
        await asyncio.to_thread(_append, self._path, json.dumps(record) + "\n")


def _append(path: Path, line: str) -> None:
    """A full disk is reported, not raised: it must not end the run."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line)
    except OSError as error:
        log.warning("%s not written: %s", path, error.strerror or error)
