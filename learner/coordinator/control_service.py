"""The LearnerControl service: status, checkpoint, stop and turns on request."""

from __future__ import annotations

import asyncio
from typing import Any

from rollmesh.learner.control_requests import REQUEST, ControlRequests
from rollmesh.learner.placement.turn_requests import TurnRequests
from rollmesh.learner.status import LearnerStatus
from rollmesh.mesh.errors import ConfigError
from rollmesh.protos import learner_pb2, learner_pb2_grpc

SERVICE_NAME = learner_pb2.DESCRIPTOR.services_by_name["LearnerControl"].full_name


class LearnerControlService(learner_pb2_grpc.LearnerControlServicer):
    """Answers from the learner's state; requests go through `ControlRequests` and `TurnRequests`.

    Args:
        status, controls: of the learner.
        turns: None where no devices are shared.
    """

    def __init__(self, status: LearnerStatus, controls: ControlRequests, turns: TurnRequests | None) -> None:
        self._status = status
        self._controls = controls
        self._turns = turns

    async def Status(
        self, _request: learner_pb2.LearnerStatusRequest, _context: Any
    ) -> learner_pb2.LearnerStatusResponse:
        """Phase, versions and the metrics of the last step."""
        status = self._status
        held_s = self._turns.held_s if self._turns is not None else 0.0
        placement = status.placement.to_proto(status.waiting_reason, held_s) if status.placement is not None else None
        return learner_pb2.LearnerStatusResponse(
            published=status.published.to_proto() if status.published else None,
            total_steps=status.steps,
            metrics=status.last_metrics,
            phase=status.phase,
            committed_version=status.committed,
            reason=status.waiting_reason,
            placement=placement,
        )

    async def Checkpoint(
        self, _request: learner_pb2.CheckpointRequest, _context: Any
    ) -> learner_pb2.CheckpointResponse:
        """Answers when the checkpoint is durable and committed; the caller's deadline bounds the wait."""
        path, version = await asyncio.wrap_future(self._controls.request_checkpoint())
        return learner_pb2.CheckpointResponse(path=str(path), version=version)

    async def Stop(self, _request: learner_pb2.StopRequest, _context: Any) -> learner_pb2.StopResponse:
        """Answers at once; the learner ends after the present step."""
        self._controls.stop(REQUEST)
        return learner_pb2.StopResponse()

    async def Yield(self, request: learner_pb2.YieldRequest, _context: Any) -> learner_pb2.YieldResponse:
        """Answers when the generators have the devices; the caller's deadline bounds the wait."""
        await asyncio.wrap_future(self._turn_requests().hold(request.hold_ms / 1000))
        return learner_pb2.YieldResponse()

    async def Resume(self, _request: learner_pb2.ResumeTurnsRequest, _context: Any) -> learner_pb2.ResumeTurnsResponse:
        """Answers at once; the next turn begins as soon as there is a batch."""
        self._turn_requests().resume()
        return learner_pb2.ResumeTurnsResponse()

    def _turn_requests(self) -> TurnRequests:
        if self._turns is None:
            raise ConfigError("this learner has its devices for itself", hint="placement.mode says who shares them")
        return self._turns
