"""The learner's client of one role's processes.

Invariants: every call has a number, so it may be repeated. An answer that says nothing for a while counts as lost. A
role that is not trained has no state that could be lost: where its processes have started again they get the batch
again. The loss of a trained model is a `RoleLostError`, as is a role that stays away.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import xxhash

from rollmesh.learner.algorithms.types import ModelRole
from rollmesh.learner.engines.interface import StepResult
from rollmesh.learner.engines.schedule import RunStep
from rollmesh.learner.roles.tensor_parts import Arrays, TensorAssembly, to_parts
from rollmesh.mesh.errors import (
    ConfigError,
    PermissionDeniedError,
    RoleLostError,
    RollmeshError,
    UnauthenticatedError,
)
from rollmesh.mesh.rpc.errors import is_transient, to_rollmesh_error
from rollmesh.mesh.rpc.retries import Retries
from rollmesh.protos import role_pb2, role_pb2_grpc

log = logging.getLogger(__name__)
T = TypeVar("T")
_PAUSE_S = 0.2
# Bytes per second below which a link is too slow for tensors.
_SLOWEST = 4e6
# Starts of a role's processes within one call, after which something kills them every time.
_MOST_STARTS = 5
_LOST_HINT = "see the log of `rollmesh role`; the learner continues from its last checkpoint once the role is back"

Dial = Callable[[str], grpc.aio.Channel]
"""Opens a channel to an address."""
Find = Callable[[], Awaitable[Sequence[str]]]
"""Addresses at which roles are served, of which one may be the role's."""


@dataclass(frozen=True, slots=True)
class RoleLimits:
    """Longest waits, in seconds.

    Attributes:
        silence_s: of an answer that says nothing.
        away_s: for a role that does not answer.
        call_s: for the result of one call.
        most_bytes: of the tensors of an answer.
    """

    silence_s: float = 30.0
    away_s: float = 600.0
    call_s: float = 1800.0
    most_bytes: int = 64 << 30


class RoleClient:
    """Calls the processes of a role; one caller, on the event loop.

    Args:
        role: of the algorithm.
        settings: on which both sides have to agree, by key, as JSON.
        find, dial: to reach it.
        limits: of waits.
        report: called with the reason of a wait for the role, in words, and with nothing at its end.

    Attributes:
        description: of the role, once it has been reached.
        session: that is open.
    """

    def __init__(
        self,
        role: ModelRole,
        settings: Mapping[str, str],
        find: Find,
        dial: Dial,
        limits: RoleLimits,
        report: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        self._role = role
        self._settings = settings
        self._find = find
        self._dial = dial
        self._limits = limits
        self._report = report
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._stub: Any = None
        self._incarnation, self._number = 0, 0
        self._tensors: Arrays = {}
        self._digests: dict[str, bytes] = {}
        self._lost: RoleLostError | None = None
        self.session = ""
        self.description = role_pb2.DescribeRoleResponse()

    async def attach(self, incarnation: int, checkpoint: str = "") -> None:
        """Begins a session.

        Args:
            incarnation: of this learner.
            checkpoint: folder of the role's part; empty: the model as it was loaded first.

        Raises:
            RoleLostError: the role stays away.
            UnauthenticatedError: it does not take this learner's token.
            ConfigError: it is served with other settings.
            FencedError: a newer learner has it.
            DataError: the checkpoint is not where the role's processes are.
        """
        self.session, self._incarnation, self._number = uuid.uuid4().hex, incarnation, 0
        self._tensors, self._digests, self._lost = {}, {}, None
        request = role_pb2.AttachRoleRequest(session=self.session, incarnation=incarnation, checkpoint=checkpoint)
        await self._repeat(lambda: self._answers(self._stub.Attach(request, timeout=self._limits.call_s)))

    async def put(self, tensors: Arrays) -> None:
        """Gives tensors of a batch; those that the role has already are not sent again, and all others are dropped."""
        digests = {name: _digest(array) for name, array in tensors.items()}
        kept = [name for name, digest in digests.items() if self._digests.get(name) == digest]
        new = {name: array for name, array in tensors.items() if name not in kept}
        self._tensors = dict(tensors)
        # A call that fails may have brought some of them.
        self._digests = {}
        try:
            await self._put(new, kept)
        except RoleLostError:
            await self._start_over()
        self._digests = digests

    async def infer(self, minibatches: Sequence[int], *, sum_pi_squared: bool = False) -> Arrays:
        """The model's output on the batch, by field; see `RoleBatch.infer`."""
        request = role_pb2.InferRoleRequest(minibatches=minibatches, sum_pi_squared=sum_pi_squared)
        try:
            answers = await self._compute("Infer", request)
        except RoleLostError:
            await self._start_over()
            answers = await self._compute("Infer", request)
        assembly = TensorAssembly(self._limits.most_bytes)
        for answer in answers:
            assembly.add(answer.tensor)
        return assembly.finish()

    async def accumulate(self, loss: str, minibatch: int, *, skip_zero_advantage: bool, state: str) -> None:
        """Has the gradient of a step computed; see `RoleWorker.accumulate`."""
        request = role_pb2.AccumulateRoleRequest(
            loss=loss, minibatch=minibatch, skip_zero_advantage=skip_zero_advantage, algorithm_state=state
        )
        await self._compute("Accumulate", request)

    async def apply(self, at: RunStep) -> StepResult:
        """The optimizer step, which belongs to this step of the run."""
        (answer,) = await self._compute("Apply", role_pb2.ApplyRoleRequest(step=at.number, steps=at.total))
        return StepResult(dict(answer.step.metrics), answer.step.skipped)

    async def discard(self) -> None:
        """Gives up the gradient."""
        await self._compute("Discard", role_pb2.DiscardRoleRequest())

    async def begin_checkpoint(self, folder: str, extra: dict[str, object]) -> None:
        """Has the role's part of a checkpoint written; its state is copied when this returns."""
        request = role_pb2.BeginRoleCheckpointRequest(folder=folder, extra=json.dumps(extra))
        await self._compute("BeginCheckpoint", request)

    async def await_checkpoint(self, session: str) -> None:
        """Waits until the last checkpoint that was begun is written.

        Args:
            session: in which it was begun.

        Raises:
            DataError: a disk refuses it.
        """
        call = role_pb2.RoleCall(session=session, incarnation=self._incarnation)
        request = role_pb2.AwaitRoleCheckpointRequest(call=call)
        await self._repeat(lambda: self._answers(self._stub.AwaitCheckpoint(request, timeout=self._limits.call_s)))

    async def close(self) -> None:
        """Closes the connections."""
        for channel in self._channels.values():
            await channel.close()

    async def _put(self, tensors: Arrays, kept: Iterable[str]) -> None:
        deadline_s = self._limits.silence_s + sum(array.nbytes for array in tensors.values()) / _SLOWEST

        async def parts(call: role_pb2.RoleCall) -> AsyncIterator[role_pb2.RolePart]:
            yield role_pb2.RolePart(header=role_pb2.PutRoleHeader(call=call, kept=kept))
            for part in to_parts(tensors):
                yield role_pb2.RolePart(tensor=part)

        await self._numbered(lambda call: self._stub.Put(parts(call), timeout=deadline_s))

    async def _compute(self, verb: str, request: Any) -> list[role_pb2.RoleAnswer]:
        """Makes the next call of the session, one that answers in a stream."""

        def ask(call: role_pb2.RoleCall) -> Awaitable[list[role_pb2.RoleAnswer]]:
            request.call.CopyFrom(call)
            return self._answers(getattr(self._stub, verb)(request, timeout=self._limits.call_s))

        return await self._numbered(ask)

    async def _start_over(self) -> None:
        """Gives the batch to processes that have started again.

        Raises:
            RoleLostError: the role is trained, and its state is lost; or they start again and again.
        """
        if self._role.trained:
            raise RoleLostError(f"the processes of role {self._role.name} have lost its model", hint=_LOST_HINT)
        tensors = self._tensors
        for start in range(1, _MOST_STARTS + 1):
            log.warning("the processes of role %s have started again: they get the batch again", self._role.name)
            try:
                await self.attach(self._incarnation)
                await self._put(tensors, ())
            except RoleLostError:
                if start == _MOST_STARTS:
                    raise
                continue
            self._tensors = tensors
            self._digests = {name: _digest(array) for name, array in tensors.items()}
            return

    async def _numbered(self, ask: Callable[[role_pb2.RoleCall], Awaitable[T]]) -> T:
        """Makes the next call of the session, again and again until it is answered."""
        if self._lost is not None:
            # A lost model does not come back, and need not be waited for again.
            raise self._lost
        self._number += 1
        call = role_pb2.RoleCall(session=self.session, incarnation=self._incarnation, number=self._number)
        try:
            return await self._repeat(lambda: ask(call))
        except RoleLostError as lost:
            self._lost = lost if self._role.trained else None
            raise

    async def _repeat(self, attempt: Callable[[], Awaitable[T]]) -> T:
        retries, waits = Retries(self._limits.away_s), False
        while True:
            try:
                if self._stub is None:
                    await self._reach()
                if waits:
                    self._report("")
                return await attempt()
            except (grpc.aio.AioRpcError, TimeoutError) as error:
                if isinstance(error, grpc.aio.AioRpcError) and not is_transient(error):
                    raise _refusal(error, f"role {self._role.name}") from error
                # It may have another address when it is back.
                self._stub = None
                reason = _reason(error)
                if retries.record_failure():
                    raise RoleLostError(
                        f"role {self._role.name} has not answered for {self._limits.away_s:.0f} s: {reason}",
                        hint=_LOST_HINT,
                    ) from error
                if retries.should_log():
                    log.warning("role %s does not answer, and is asked again: %s", self._role.name, reason)
                self._report(f"waits for the processes of role {self._role.name}: {reason}")
                waits = True
            await asyncio.sleep(_PAUSE_S)

    async def _answers(self, stream: Any) -> list[role_pb2.RoleAnswer]:
        """All answers but the words that the work continues.

        Raises:
            TimeoutError: it says nothing for too long.
        """
        found: list[role_pb2.RoleAnswer] = []
        try:
            while True:
                answer = await asyncio.wait_for(stream.read(), self._limits.silence_s)
                if answer is grpc.aio.EOF:
                    return found
                if not answer.HasField("working"):
                    found.append(answer)
        finally:
            stream.cancel()

    async def _reach(self) -> None:
        """Finds the role among those that are served.

        Raises:
            TimeoutError: it is not there now.
            UnauthenticatedError: its processes do not take this learner's token.
            PermissionDeniedError: the token is for another role of the mesh.
            ConfigError: it is served with other settings than the learner has.
        """
        addresses = await self._find()
        failures = []
        for address in addresses:
            channel = self._channels.get(address) or self._dial(address)
            self._channels[address] = channel
            stub: Any = role_pb2_grpc.RoleModelStub(channel)
            try:
                described = await stub.Describe(role_pb2.DescribeRoleRequest(), timeout=self._limits.silence_s)
            except grpc.aio.AioRpcError as error:
                if not is_transient(error):
                    raise _refusal(error, f"role {self._role.name} at {address}") from error
                unreached = to_rollmesh_error(error, address)
                failures.append(f"{unreached.message}; {unreached.hint}")
                continue
            if described.role == self._role.name:
                self._check(described, address)
                self._stub, self.description = stub, described
                return
        served = "; ".join(failures) or f"{len(addresses)} other role(s) are served"
        raise TimeoutError(f"no process serves it ({served}): start `rollmesh role {self._role.name}`")

    def _check(self, described: role_pb2.DescribeRoleResponse, address: str) -> None:
        ours = {"kind": self._role.kind, "trained": json.dumps(self._role.trained), **self._settings}
        theirs = {"kind": described.kind, "trained": json.dumps(described.trained), **described.settings}
        for key in sorted(ours.keys() | theirs.keys()):
            if ours.get(key) != theirs.get(key):
                raise ConfigError(
                    f"role {self._role.name} at {address} has {key}: {theirs.get(key)}, the learner {ours.get(key)}",
                    hint="start it with the learner's configuration",
                )


def _digest(array: Any) -> bytes:
    return xxhash.xxh3_128_digest(memoryview(array).cast("B") if array.size else b"") + str(array.shape).encode()


def _refusal(error: grpc.aio.AioRpcError, role: str) -> RollmeshError:
    """The typed error of a call that was refused; one about who calls names the role, which its service cannot do.

    Args:
        error: not transient.
        role: its name, and where it is.
    """
    found = to_rollmesh_error(error, role)
    if isinstance(found, UnauthenticatedError | PermissionDeniedError) and not found.message.startswith(role):
        return type(found)(f"{role}: {found.message}", hint=found.hint)
    return found


def _reason(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return error.details() or error.code().name
    return str(error) or "no answer"
