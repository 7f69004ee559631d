"""Reports to the learner of each version: that it is in service and how it came, or why it is not."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import grpc

from rollmesh.generators.engines.types import SwapTimings
from rollmesh.generators.weights.learner_connection import LearnerConnection
from rollmesh.generators.weights.verified_transfer import VerifiedWeights
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.runtime.background_tasks import BackgroundTasks, log_errors
from rollmesh.mesh.text import REPORT_CHARACTERS, bounded
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import weights_pb2

log = logging.getLogger(__name__)
_TIMEOUT_S = 10.0


def failure(member_id: str, policy: PolicyVersion, error: WeightsError, digest: str) -> weights_pb2.SwapReport:
    """The report of a version that is not in service; `digest` is that of the weights that are."""
    return weights_pb2.SwapReport(
        member_id=member_id, policy=policy.to_proto(), error=bounded(str(error), REPORT_CHARACTERS), digest=digest
    )


def success(
    member_id: str, policy: PolicyVersion, received: VerifiedWeights, timings: SwapTimings, since_ns: int
) -> weights_pb2.SwapReport:
    """The report of a version in service; its times count from `since_ns` (Unix)."""

    def since_us(moment_ns: int) -> int:
        # Clocks of two hosts may differ; a negative time would be worse than none.
        return max(0, (moment_ns - since_ns) // 1000)

    return weights_pb2.SwapReport(
        member_id=member_id,
        policy=policy.to_proto(),
        digest=timings.digest,
        transport=received.transport,
        bytes=received.nbytes,
        encoding=received.encoding,
        source=received.source,
        first_byte_us=since_us(received.first_byte_ns),
        last_byte_us=since_us(received.last_byte_ns),
        pause_us=round(timings.pause_us),
        total_us=since_us(time.time_ns()),
    )


class SwapReporter:
    """Sends reports in the background; a learner that is gone does not get them.

    Args:
        on_report: is called with each report, in the event loop.
    """

    def __init__(self, on_report: Callable[[weights_pb2.SwapReport], None] | None) -> None:
        self._on_report = on_report
        self._tasks = BackgroundTasks(log_errors(log))

    def send(self, connection: LearnerConnection, report: weights_pb2.SwapReport) -> None:
        """Sends a report; returns at once."""
        if self._on_report is not None:
            self._on_report(report)
        self._tasks.spawn(_send(connection, report), "report-swap")


async def _send(connection: LearnerConnection, report: weights_pb2.SwapReport) -> None:
    try:
        await connection.weights.Report(report, timeout=_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        log.debug("report of version %s was not taken: %s", report.policy.version, error.details())
    except grpc.aio.UsageError:
        log.debug("report of version %s was not sent: the learner has changed", report.policy.version)
