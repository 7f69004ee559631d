"""The LearnerControl service: status, checkpoint and stop on request."""

from __future__ import annotations

import asyncio
from typing import Any

from rollmesh.learner.control_requests import ControlRequests
from rollmesh.learner.status import LearnerStatus
from rollmesh.protos import learner_pb2, learner_pb2_grpc

SERVICE_NAME = learner_pb2.DESCRIPTOR.services_by_name["LearnerControl"].full_name


class LearnerControlService(learner_pb2_grpc.LearnerControlServicer):
    """Answers from the learner's state; requests go through `ControlRequests`."""

    def __init__(self, status: LearnerStatus, controls: ControlRequests) -> None:
        self._status = status
        self._controls = controls

    async def Status(
        self, _request: learner_pb2.LearnerStatusRequest, _context: Any
    ) -> learner_pb2.LearnerStatusResponse:
        """Phase, versions and the metrics of the last step."""
        status = self._status
        return learner_pb2.LearnerStatusResponse(
            published=status.published.to_proto() if status.published else None,
            total_steps=status.steps,
            metrics=status.last_metrics,
            phase=status.phase,
            committed_version=status.committed,
            reason=status.waiting_reason,
        )

    async def Checkpoint(
        self, _request: learner_pb2.CheckpointRequest, _context: Any
    ) -> learner_pb2.CheckpointResponse:
        """Answers when the checkpoint is durable and committed; the caller's deadline bounds the wait."""
        path, version = await asyncio.wrap_future(self._controls.request_checkpoint())
        return learner_pb2.CheckpointResponse(path=str(path), version=version)

    async def Stop(self, _request: learner_pb2.StopRequest, _context: Any) -> learner_pb2.StopResponse:
        """Answers at once; the learner ends after the present step."""
        self._controls.stop("request")
        return learner_pb2.StopResponse()
