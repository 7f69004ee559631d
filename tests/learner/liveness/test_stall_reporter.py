"""The end of a run that stands still, whatever else fails at that moment."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from rollmesh.buffer.client.client import BufferClient
from rollmesh.learner.control_requests import ControlRequests
from rollmesh.learner.liveness.stall_reporter import StallReporter
from rollmesh.learner.status import LearnerStatus
from rollmesh.mesh.errors import StalledError, UnreachableError
from rollmesh.protos import buffer_pb2


class Silent:
    async def holders(self, _table: str, _limit: int) -> buffer_pb2.HoldersResponse:
        raise UnreachableError("the buffer does not answer")


async def test_a_limit_that_is_reached_ends_the_run_as_stalled_though_no_one_says_who_holds_what(
    tmp_path: Path,
) -> None:
    clock, controls = [0.0], ControlRequests()
    status = LearnerStatus(phase="waiting_for_groups")
    reporter = StallReporter(
        cast("BufferClient", Silent()), status, controls, tmp_path, stall_s=10, limit_s=20, clock=lambda: clock[0]
    )
    for at in range(0, 60, 10):
        clock[0] = float(at)
        await reporter.observe(buffer_pb2.DescribeResponse(moved_unix_ms=1))
    with pytest.raises(StalledError, match="who holds groups is not known: the buffer does not answer"):
        controls.raise_failure()
