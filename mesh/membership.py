"""A service's membership of the mesh: joining, heartbeats, and the state of the mesh that their answers carry.

Invariants
  * The agent keeps trying while the mesh is away, for at most `retry_s` in a row, and then reports that through `lost`.
  * A channel to the mesh learns from every answer which fronts are alive.
  * A member that the mesh has forgotten joins again under a new connection generation.
  * A learner that was superseded sees `fenced`.
  * Where there is a token, only fronts that prove that they belong to its mesh are believed (`mesh.access.proof`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import grpc

from rollmesh.mesh.access.authenticated_channel import AuthenticatedChannel
from rollmesh.mesh.access.credentials import Credentials
from rollmesh.mesh.access.proof import check_answer, new_challenge
from rollmesh.mesh.access.token_file import Expiry
from rollmesh.mesh.errors import ConfigError, RollmeshError, UnauthenticatedError, UnreachableError, ended_by
from rollmesh.mesh.rpc.errors import to_rollmesh_error
from rollmesh.mesh.rpc.failover_channel import FailoverChannel
from rollmesh.mesh.rpc.retries import Retries, call_with_retry
from rollmesh.mesh.text import WAITING_CHARACTERS, bounded
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.wait import NO_WAIT, Wait
from rollmesh.protos import membership_pb2, membership_pb2_grpc

log = logging.getLogger(__name__)
# The version of the contracts. A mesh accepts only members with its own.
PROTOCOL = 2
SHARES_DEVICES, ASLEEP = "shares_devices", "asleep"
"""Gauges of a generator: it shares the learner's devices, and it sleeps."""
# Seconds without an answer to a Join between two words on it.
_JOIN_LOG_S = 10.0
# Heartbeats that may time out one after the other within a member's time to live.
_LOST_HEARTBEATS = 4
_LEAST_PATIENCE_S = 1.0


class Presence:
    """The times without a gap in which the others see this member, by its own clock.

    They see it for its time to live after each heartbeat. It counts from when that was sent, and so ends no later here.

    Attributes:
        term: number of the present time without a gap; another one begins after each.
    """

    def __init__(self) -> None:
        self.term = 0
        self._until = -math.inf

    def renew(self, sent_at: float, ttl_s: float) -> None:
        """Counts an answered heartbeat, which was sent at a monotonic time."""
        if time.monotonic() >= self._until:
            self.term += 1
        self._until = sent_at + ttl_s

    def end(self) -> None:
        """The others do not see this member any more."""
        self._until = -math.inf

    def holds(self, term: int) -> bool:
        """True if a term has not ended."""
        return term == self.term and time.monotonic() < self._until


class MembershipAgent:
    """Joins the mesh and heartbeats in the background.

    Args:
        channel: to the mesh (`mesh.rpc.failover_channel.open_mesh`), or to one front alone.

    Attributes:
        member_id: this process's id.
        generation: connection generation of the last Join; later calls carry it.
        presence: whether the others see this member.
        run_name, config_json: the run, as the mesh describes it.
        learner: the learner's membership entry; None without a learner.
        policy: the version in force; None before the first.
        fenced: set when this learner's incarnation was taken over.
        run_finished: set when the run ends in order. A member that joins a run that has ended already waits for a
            learner that continues it.
        lost: set when the mesh could not be reached, or believed, for `retry_s`; `lost_error` says why.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        role: membership_pb2.Role,
        *,
        member_id: str,
        address: str,
        host_id: str,
        timeout_s: float = 10.0,
        retry_s: float = 60.0,
    ) -> None:
        self._stub: Any = membership_pb2_grpc.MembershipStub(channel)
        # A channel to one front stays with it.
        self._fronts = channel if isinstance(channel, FailoverChannel) else None
        self._mesh = f"the mesh at {','.join(self._fronts.addresses)}" if self._fronts else "the mesh"
        self._credentials = _credentials_of(channel)
        self._expiry = Expiry(self._credentials)
        self._join_request = membership_pb2.JoinRequest(
            member_id=member_id, role=role, address=address, host_id=host_id, pid=os.getpid(), protocol=PROTOCOL
        )
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._interval_s = 1.0
        self._heartbeat_timeout_s = timeout_s
        self._serving: PolicyVersion | None = None
        self._gauges: dict[str, float] = {}
        self._wait = self._reported_wait = NO_WAIT
        # Cuts the pause between two heartbeats short.
        self._hurry = asyncio.Event()
        self._endpoint = ""
        self._incarnation = 0
        self._listeners: list[Callable[[], None]] = []
        self._task: asyncio.Task[None] | None = None
        self._has_run: bool | None = None
        self._next_log_at = 0.0
        self.member_id = member_id
        self.generation = 0
        self.presence = Presence()
        self._ttl_s = 0.0
        self.run_name = ""
        self.config_json = ""
        self.learner: membership_pb2.Member | None = None
        self.policy: PolicyVersion | None = None
        self.fenced = asyncio.Event()
        self.run_finished = asyncio.Event()
        self.lost = asyncio.Event()
        self.lost_error: RollmeshError | None = None

    async def start(self) -> None:
        """Joins and starts to heartbeat.

        Raises:
            UnreachableError: the mesh did not answer within `retry_s`.
            UnauthenticatedError: the answer is not from the mesh, or the mesh does not know this member's token.
        """
        await self._join(self._retry_s)
        await call_with_retry(self.heartbeat, retry_s=self._retry_s, what="the first heartbeat")
        self._task = asyncio.create_task(self._run(), name="heartbeat")
        self._task.add_done_callback(self._on_task_done)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Calls `listener` whenever learner, policy or generation changed."""
        self._listeners.append(listener)

    def set_status(
        self,
        *,
        serving: PolicyVersion | None = None,
        gauges: Mapping[str, float] | None = None,
        wait: Wait | None = None,
        incarnation: int | None = None,
        endpoint: str | None = None,
    ) -> None:
        """Sets the status that the next heartbeats report; arguments left out stay as they were.

        The end of a wait that the mesh has heard of is reported at once, its beginning with the next heartbeat.
        """
        self._serving = serving or self._serving
        if wait is not None:
            self._wait = replace(wait, reason=bounded(wait.reason, WAITING_CHARACTERS))
            self._report_end_of_wait()
        self._incarnation = incarnation or self._incarnation
        self._endpoint = endpoint or self._endpoint
        self._gauges.update(gauges or {})
        # A loss may be NaN. The mesh takes numbers alone, and an earlier one would be out of date.
        self._gauges = {name: value for name, value in self._gauges.items() if math.isfinite(value)}

    def _report_end_of_wait(self) -> None:
        if self._reported_wait and not self._wait:
            self._hurry.set()

    async def heartbeat(self) -> None:
        """Sends one heartbeat now; joins again if the mesh does not know this member any more.

        Raises:
            UnauthenticatedError: this member's grant is over, or the answer is not from the mesh.
        """
        request = membership_pb2.HeartbeatRequest(
            member_id=self.member_id,
            generation=self.generation,
            serving=self._serving.to_proto() if self._serving else None,
            gauges={**self._gauges, **self._expiry.gauges()},
            waiting_reason=self._wait.reason,
            wait_cause=self._wait.cause,
            incarnation=self._incarnation,
            endpoint=self._endpoint,
            challenge=new_challenge(),
        )
        reported, sent_at = self._wait, time.monotonic()
        self._hurry.clear()
        response = await self._stub.Heartbeat(request, timeout=self._heartbeat_timeout_s)
        check_answer(self._credentials, request, response, self._mesh)
        self._reported_wait = reported
        self._report_end_of_wait()
        if not response.known:
            self.presence.end()
            await self._join(self._retry_s)
            self._notify()
            return
        self.presence.renew(sent_at, self._ttl_s)
        if self._fronts is not None:
            self._fronts.set_fronts(response.fronts)
        learner = response.learner if response.learner.member_id else None
        policy = PolicyVersion.from_proto(response.policy) if response.HasField("policy") else None
        changed = policy != self.policy or _identity(learner) != _identity(self.learner)
        self.learner, self.policy = learner, policy
        if response.fenced:
            self.fenced.set()
        if self._has_run is None and response.run_finished:
            log.info("run %s has ended; waiting for a learner that continues it", self.run_name)
        self._has_run = self._has_run or not response.run_finished
        if response.run_finished and self._has_run:
            self.run_finished.set()
        if changed or response.fenced or self.run_finished.is_set():
            self._notify()

    async def members(self, role: membership_pb2.Role = membership_pb2.ROLE_UNSPECIFIED) -> list[membership_pb2.Member]:
        """The members of a role (all when unspecified)."""
        request = membership_pb2.ListRequest(role=role)
        response = await call_with_retry(
            lambda: self._stub.List(request, timeout=self._timeout_s), retry_s=self._retry_s, what="listing members"
        )
        return list(response.members)

    async def leave(self, *, run_finished: bool = False) -> None:
        """Stops the heartbeats and leaves in order; the mesh's absence is logged, not raised."""
        await self.stop()
        request = membership_pb2.LeaveRequest(
            member_id=self.member_id, generation=self.generation, run_finished=run_finished
        )
        try:
            await self._stub.Leave(request, timeout=self._timeout_s)
        except (grpc.aio.AioRpcError, UnauthenticatedError) as error:
            log.warning("could not leave the mesh: %s", error)

    async def stop(self) -> None:
        """Stops the heartbeats without leaving the mesh."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _join(self, retry_s: float) -> None:
        # Greater than those of this process' earlier joins, so that a late copy of one is known.
        self._join_request.call = max(self._join_request.call + 1, time.time_ns() // 1000)
        log.info("joining %s", self._mesh)
        what = f"joining {self._mesh}"
        response = await call_with_retry(self._try_to_join, retry_s=retry_s, what=what)
        if response.call > self._join_request.call:
            # The clock of an earlier process with this id was ahead of this one's.
            self._join_request.call = response.call + 1
            response = await call_with_retry(self._try_to_join, retry_s=retry_s, what=what)
        self.generation = response.generation
        self.run_name = response.run_name
        self.config_json = response.run_config_json
        self._interval_s = response.heartbeat_interval_ms / 1000
        self._ttl_s = response.member_ttl_ms / 1000
        # A front that hangs may cost a heartbeat, but not the membership; one that is merely slow gets its time.
        patience_s = max(_LEAST_PATIENCE_S, self._ttl_s / _LOST_HEARTBEATS)
        self._heartbeat_timeout_s = min(self._timeout_s, patience_s)
        if self._fronts is not None:
            self._fronts.set_lease(self._ttl_s)
            self._fronts.set_fronts(response.fronts)
        log.info("joined run %s as %s (generation %d)", self.run_name, self.member_id, self.generation)

    async def _try_to_join(self) -> membership_pb2.JoinResponse:
        # A copy: another join may begin while this one waits.
        request = membership_pb2.JoinRequest(challenge=new_challenge())
        request.MergeFrom(self._join_request)
        try:
            response: membership_pb2.JoinResponse = await self._stub.Join(request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            if time.monotonic() >= self._next_log_at:
                self._next_log_at = time.monotonic() + _JOIN_LOG_S
                failure = to_rollmesh_error(error, "Join")
                log.warning("waits for %s, %.0f s at most: %s", self._mesh, self._retry_s, failure)
            raise
        check_answer(self._credentials, request, response, self._mesh)
        return response

    async def _run(self) -> None:
        retries, pause_s = Retries(self._retry_s), self._interval_s
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), pause_s)
            try:
                await self.heartbeat()
                retries.record_answer()
                pause_s = self._interval_s
            except (grpc.aio.AioRpcError, UnauthenticatedError) as error:
                # Another front may be believed, and a grant that is over may be replaced.
                is_last, pause_s = retries.record_failure(), self._interval_s / _LOST_HEARTBEATS
                failure = error if isinstance(error, RollmeshError) else to_rollmesh_error(error, "heartbeat")
                if retries.should_log():
                    log.warning("heartbeats fail, %.0f s more at most: %s", self._retry_s - retries.failing_s, failure)
                if is_last:
                    self._give_up(failure)
                    return
            except RollmeshError as error:
                self._give_up(error)
                return

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """Marks the member as lost if its heartbeats have failed."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("heartbeats failed", exc_info=error)
        self.lost_error = ended_by(error, "the task of the heartbeats")
        self.lost.set()

    def _give_up(self, error: RollmeshError) -> None:
        away = UnreachableError(f"the mesh has not answered for {self._retry_s:.0f} s: {error.message}")
        # A restart does not mend what the operator must mend.
        self.lost_error = error if isinstance(error, ConfigError) else away
        self.lost.set()
        self._notify()

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()


def _identity(member: membership_pb2.Member | None) -> tuple[str, str] | None:
    return (member.member_id, member.address) if member else None


def _credentials_of(channel: grpc.aio.Channel) -> Credentials | None:
    """The credentials with which the calls of a channel are made."""
    found = channel.credentials if isinstance(channel, (FailoverChannel, AuthenticatedChannel)) else None
    return found if isinstance(found, Credentials) else None
