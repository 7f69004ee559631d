"""The gRPC side of a role's processes: sessions, numbers of calls, and answers that say that the work continues.

Invariants: a call is done once. Calls of another session than the last are refused, and those of a learner that was
superseded with a `FencedError`. A caller that is gone ends nothing: its call is done, and its outcome kept for the
repetition.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any, Protocol

from rollmesh.learner.role_service.numbered_calls import NumberedCalls
from rollmesh.learner.roles.tensor_parts import TensorAssembly, to_parts
from rollmesh.mesh.errors import DataError, FencedError, PayloadError, RoleLostError
from rollmesh.protos import role_pb2, role_pb2_grpc

SERVICE_NAME = role_pb2.DESCRIPTOR.services_by_name["RoleModel"].full_name
WORKING_S = 1.0
"""Seconds between two words of an answer that the work continues."""


class Computing(Protocol):
    """The processes that compute, see `RoleRanks`."""

    @property
    def written(self) -> Future[None]: ...

    def submit(self, order: str, **arguments: Any) -> Future[Any]: ...


class RoleServicer(role_pb2_grpc.RoleModelServicer):
    """Answers the learner.

    Args:
        description: of the role.
        ranks: compute.
        most_bytes: of the tensors of one batch.
    """

    def __init__(self, description: role_pb2.DescribeRoleResponse, ranks: Computing, *, most_bytes: int) -> None:
        self._description = description
        self._ranks = ranks
        self._most_bytes = most_bytes
        self._session, self._incarnation = "", 0
        self._calls: NumberedCalls[Future[Any]] = NumberedCalls()
        self._attached: Future[Any] = Future()

    async def Describe(self, _request: role_pb2.DescribeRoleRequest, _context: Any) -> role_pb2.DescribeRoleResponse:
        """See role.proto."""
        return self._description

    async def Attach(self, request: role_pb2.AttachRoleRequest, _context: Any) -> AsyncIterator[role_pb2.RoleAnswer]:
        """See role.proto."""
        if request.incarnation < self._incarnation:
            raise FencedError
        if not request.session:
            raise PayloadError("session", "is empty")
        if request.session != self._session:
            self._session, self._incarnation = request.session, request.incarnation
            self._calls = NumberedCalls()
            self._attached = self._ranks.submit("attach", checkpoint=request.checkpoint)
        async for answer in _until_done(self._attached):
            yield answer

    async def Put(self, requests: AsyncIterator[role_pb2.RolePart], _context: Any) -> role_pb2.PutRoleResponse:
        """See role.proto."""
        header: role_pb2.PutRoleHeader | None = None
        tensors = TensorAssembly(self._most_bytes)
        async for part in requests:
            if part.HasField("header"):
                header = part.header
                self._check(header.call)
            elif header is None:
                raise PayloadError("header", "does not come first")
            else:
                tensors.add(part.tensor)
        if header is None:
            raise PayloadError("header", "is missing")
        arrays, kept = tensors.finish(), list(header.kept)
        await asyncio.shield(
            asyncio.wrap_future(self._begin(header.call, lambda: self._ranks.submit("put", tensors=arrays, kept=kept)))
        )
        return role_pb2.PutRoleResponse()

    async def Infer(self, request: role_pb2.InferRoleRequest, _context: Any) -> AsyncIterator[role_pb2.RoleAnswer]:
        """See role.proto."""
        future = self._begin(
            request.call,
            lambda: self._ranks.submit(
                "infer", minibatches=list(request.minibatches), sum_pi_squared=request.sum_pi_squared
            ),
        )
        async for answer in _until_done(future):
            yield answer
        for part in to_parts(future.result()):
            yield role_pb2.RoleAnswer(tensor=part)

    async def Accumulate(
        self, request: role_pb2.AccumulateRoleRequest, _context: Any
    ) -> AsyncIterator[role_pb2.RoleAnswer]:
        """See role.proto."""
        future = self._begin(
            request.call,
            lambda: self._ranks.submit(
                "accumulate",
                loss=request.loss,
                minibatch=request.minibatch,
                skip_zero_advantage=request.skip_zero_advantage,
                state=request.algorithm_state,
            ),
        )
        async for answer in _until_done(future):
            yield answer

    async def Apply(self, request: role_pb2.ApplyRoleRequest, _context: Any) -> AsyncIterator[role_pb2.RoleAnswer]:
        """See role.proto."""
        future = self._begin(request.call, lambda: self._ranks.submit("apply", step=request.step, steps=request.steps))
        async for answer in _until_done(future):
            yield answer
        done = future.result()
        yield role_pb2.RoleAnswer(step=role_pb2.RoleStep(metrics=done.metrics, skipped=done.skipped))

    async def Discard(self, request: role_pb2.DiscardRoleRequest, _context: Any) -> AsyncIterator[role_pb2.RoleAnswer]:
        """See role.proto."""
        async for answer in _until_done(self._begin(request.call, lambda: self._ranks.submit("discard"))):
            yield answer

    async def BeginCheckpoint(
        self, request: role_pb2.BeginRoleCheckpointRequest, _context: Any
    ) -> AsyncIterator[role_pb2.RoleAnswer]:
        """See role.proto."""
        future = self._begin(
            request.call,
            lambda: self._ranks.submit("begin_checkpoint", folder=request.folder, extra=json.loads(request.extra)),
        )
        async for answer in _until_done(future):
            yield answer

    async def AwaitCheckpoint(
        self, request: role_pb2.AwaitRoleCheckpointRequest, _context: Any
    ) -> AsyncIterator[role_pb2.RoleAnswer]:
        """See role.proto."""
        self._check(request.call)
        written = self._ranks.written
        try:
            async for answer in _until_done(written):
                yield answer
        except OSError as error:
            raise DataError(f"role {self._description.role} cannot write its part of a checkpoint: {error}") from error

    def _begin(self, call: role_pb2.RoleCall, start: Callable[[], Future[Any]]) -> Future[Any]:
        self._check(call)
        return self._calls.begin(call.number, start)

    def _check(self, call: role_pb2.RoleCall) -> None:
        if call.incarnation < self._incarnation:
            raise FencedError
        if call.session != self._session:
            raise RoleLostError(
                f"role {self._description.role} does not know the session: its processes have started again",
                hint="the learner continues from its last checkpoint",
            )


async def _until_done(future: Future[Any]) -> AsyncIterator[role_pb2.RoleAnswer]:
    """Says every second that the work continues; raises its error."""
    waiting = asyncio.wrap_future(future)
    while not (await asyncio.wait({waiting}, timeout=WORKING_S))[0]:
        yield role_pb2.RoleAnswer(working=role_pb2.RoleWorking())
    waiting.result()
