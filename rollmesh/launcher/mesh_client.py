"""A snapshot of a mesh: its table, its members, and the learner's latest metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import Message

from rollmesh.launcher.learner_requests import learner_address
from rollmesh.launcher.placement.turns import awaited, read_sleep, read_turns, shares_devices
from rollmesh.learner.placement.swap import Phase
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import RollmeshError
from rollmesh.mesh.lease_holders import NAMED, describe_holders
from rollmesh.mesh.rpc.channel import open_channel
from rollmesh.mesh.rpc.errors import is_transient, to_rollmesh_error
from rollmesh.mesh.rpc.failover_channel import open_mesh
from rollmesh.mesh.tables import TRAIN
from rollmesh.protos import (
    buffer_pb2,
    buffer_pb2_grpc,
    learner_pb2,
    membership_pb2,
    membership_pb2_grpc,
    weights_pb2,
    weights_pb2_grpc,
)
from rollmesh.report.metrics import Record, is_evaluation, is_training
from rollmesh.report.unscored import UnscoredMembers

_DEADLINE_S = 5.0
# It counts every group.
_LEDGER_DEADLINE_S = 30.0
_PHASE = "phase/"
# Phases in which a learner does nothing else than wait; empty: there is none.
_NO_WORK = ("", "waiting for groups")


@dataclass
class Snapshot:
    """The mesh at one moment.

    Attributes:
        table: the train table's counts; None while the buffer does not answer.
        members: the members of the mesh.
        run_finished: the learner has reported the end of the run.
        learner_starts: the run's launcher has started a learner, and none has taken part since.
        training, evaluation: latest record of a training step and of an evaluation round; of a single snapshot,
            the values in the learner's heartbeat.
        unscored: responses without a reward, as far as records were followed.
        generated_tokens: that the run has sampled so far; 0 in a single snapshot.
        sample: a response of the latest step that has kept some; empty before, and in a single snapshot.
        holders: holders of the train table's groups; read where nothing moves.
        turns: of a learner that shares its devices; None where it does not, or does not answer.
        sleep: of generators that share devices, in words, by member id; as far as they were asked.
        placement: the state of trials of placements, in words; empty without `placement: auto`.
        turn_time: the time of each side of turns, in words; of a single snapshot, where the run's folder is known.
        trouble: why the mesh could not be asked; empty when it answered.
    """

    table: buffer_pb2.DescribeResponse | None = None
    members: list[membership_pb2.Member] = field(default_factory=list)
    run_finished: bool = False
    learner_starts: bool = False
    training: Record = field(default_factory=dict)
    evaluation: Record = field(default_factory=dict)
    unscored: UnscoredMembers = field(default_factory=UnscoredMembers)
    generated_tokens: float = 0.0
    sample: Record = field(default_factory=dict)
    holders: buffer_pb2.HoldersResponse | None = None
    turns: learner_pb2.PlacementStatus | None = None
    sleep: dict[str, str] = field(default_factory=dict)
    placement: str = ""
    turn_time: str = ""
    trouble: str = ""

    @classmethod
    def of(cls, table: buffer_pb2.DescribeResponse, members: membership_pb2.ListResponse) -> Snapshot:
        """Builds a single snapshot."""
        snapshot = cls(table=table, members=list(members.members), run_finished=members.run_finished)
        for learner in snapshot.learners():
            snapshot.training = snapshot.evaluation = dict(learner.gauges)
        return snapshot

    def follow(self, before: Snapshot, records: Sequence[Record]) -> None:
        """Continues the former snapshot's state of steps and evaluations, and adds new records of the metrics file."""
        self.training, self.evaluation, self.unscored = before.training, before.evaluation, before.unscored
        self.sample = before.sample
        self.learner_starts = before.learner_starts and not self.learners()
        self.unscored.add(records)
        for record in records:
            if is_training(record):
                self.training = record
            elif is_evaluation(record):
                self.evaluation = record

    def generators(self) -> list[membership_pb2.Member]:
        return [member for member in self.members if member.role == membership_pb2.ROLE_GENERATOR]

    def rewards(self) -> list[membership_pb2.Member]:
        return [member for member in self.members if member.role == membership_pb2.ROLE_REWARD]

    def sum_of(self, gauge: str) -> float:
        """Sum of a gauge over the generators."""
        return sum(member.gauges.get(gauge, 0.0) for member in self.generators())

    def without_reward(self) -> str:
        """Responses without a reward, in words: of trained groups, else as generators count; empty without any."""
        if text := self.unscored.text():
            return text
        failed, unscorable = self.sum_of("members_failed"), self.sum_of("members_unscorable")
        if not failed + unscorable:
            return ""
        responses = failed + unscorable + self.sum_of("members_scored")
        return (
            f"{failed + unscorable:.0f} of {responses:.0f} responses have no reward (error {failed:.0f}, unscorable "
            f"{unscorable:.0f}): `rollmesh ledger --failed` lists the causes of groups that failed"
        )

    def learners(self) -> list[membership_pb2.Member]:
        return [member for member in self.members if member.role == membership_pb2.ROLE_LEARNER]

    @property
    def stalled_s(self) -> float:
        """Seconds for which nothing has moved, from the learner's heartbeat; 0 while the run moves."""
        return max((member.gauges.get("stalled_seconds", 0.0) for member in self.learners()), default=0.0)

    def stall(self) -> str:
        """The stall in words, with the holders of groups; empty while the run moves."""
        if not self.stalled_s or self.table is None:
            return ""
        return (
            f"for {self.stalled_s:.0f} s: {describe_holders(self.table, self.holders or buffer_pb2.HoldersResponse())}"
        )

    def who_waits(self) -> str:
        """The present waits of learner, generators and reward services, in words."""
        if self.table is None:
            return self.trouble
        parts = []
        # While it does other things, groups of its next batch are on their way.
        if learner := self._learner_reason() or (self.table.learner_waits if self.learner_phase in _NO_WORK else ""):
            parts.append(f"learner: {learner}")
        if self.table.generators_wait:
            parts.append(f"generators wait: {self.table.generators_wait}")
        if reward := next((member.waiting_reason for member in self.rewards() if member.waiting_reason), ""):
            parts.append(f"rewards: {reward}")
        if not self.learners() and not self.run_finished:
            parts.append(self.absent_learner())
        return "; ".join(parts) or self._present_work()

    def _learner_reason(self) -> str:
        """The reason that the learner gives for its wait; with turns the newest one, for a heartbeat may be older."""
        if self.turns is not None and (self.turns.reason or self.turns.phase not in (Phase.GENERATING, Phase.TRAINING)):
            return awaited(self.turns)
        return next((member.waiting_reason for member in self.learners() if member.waiting_reason), "")

    @property
    def generators_start(self) -> bool:
        """True before any of the generators has had weights."""
        return not any(member.serving.incarnation for member in self.generators())

    @property
    def learner_phase(self) -> str:
        """The learner's present work, as its heartbeat has it, in words; empty without a learner."""
        names = (name for member in self.learners() for name, value in member.gauges.items() if value)
        found = next((name.removeprefix(_PHASE) for name in names if name.startswith(_PHASE)), "")
        return found.replace("_", " ")

    def _present_work(self) -> str:
        """The work of the learner in words; it has lasted for moments."""
        if self.learner_phase == "starting":
            return "the learner has just come up"
        return f"learner: {self.learner_phase}" if self.learner_phase else "nothing waits"

    def absent_learner(self) -> str:
        """The reason why no learner is a member, in words."""
        return "the learner is starting" if self.learner_starts else "there is no learner"


class MeshClient:
    """Reads the state of one mesh, over one channel.

    Args:
        address: the mesh address (`host:port`, or several with commas between them).
    """

    def __init__(self, address: str, security: SecuritySection) -> None:
        self._address = address
        self._security = security
        self._channel = open_mesh(address, security)
        self._buffer = buffer_pb2_grpc.BufferStub(self._channel)
        # Addresses of learners that have reported turns.
        self._sharing: set[str] = set()
        self._membership = membership_pb2_grpc.MembershipStub(self._channel)

    async def __aenter__(self) -> MeshClient:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close()

    async def read_snapshot(self) -> Snapshot:
        """The table and the members.

        Raises:
            RollmeshError: the mesh does not answer.
        """
        table, members = await asyncio.gather(self.describe(TRAIN), self.members())
        snapshot = Snapshot.of(table, members)
        if snapshot.stalled_s:
            snapshot.holders = await self.holders(TRAIN, NAMED)
        snapshot.turns = await self._turns(snapshot)
        return snapshot

    async def read_sleep(self, snapshot: Snapshot) -> None:
        """Asks the generators of a snapshot whether they sleep; those that do not answer are named."""
        snapshot.sleep = await read_sleep(snapshot.generators(), self._security)

    async def _turns(self, snapshot: Snapshot) -> learner_pb2.PlacementStatus | None:
        """The learner's turns; it is asked where generators share its devices, even while these are gone."""
        address = next((member.address for member in snapshot.learners() if member.address), "")
        if not address or not (address in self._sharing or any(map(shares_devices, snapshot.generators()))):
            return None
        try:
            turns = await read_turns(address, self._security)
        except RollmeshError:
            return None
        if turns is not None:
            self._sharing = {address}
        return turns

    async def describe(self, table: str) -> buffer_pb2.DescribeResponse:
        """The counts of a table.

        Raises:
            RollmeshError: the mesh does not answer.
        """
        answer: buffer_pb2.DescribeResponse = await self._ask(
            self._buffer.Describe, buffer_pb2.DescribeRequest(table=table), _DEADLINE_S
        )
        return answer

    async def ledger(self, table: str, failed_limit: int = 0) -> buffer_pb2.LedgerResponse:
        """A table's ledger, counted and recounted.

        Raises:
            RollmeshError: the mesh does not answer.
        """
        request = buffer_pb2.LedgerRequest(table=table, failed_limit=failed_limit)
        answer: buffer_pb2.LedgerResponse = await self._ask(self._buffer.Ledger, request, _LEDGER_DEADLINE_S)
        return answer

    async def holders(self, table: str, limit: int) -> buffer_pb2.HoldersResponse:
        """Holders of a table's groups and their times, longest first.

        Raises:
            RollmeshError: the mesh does not answer.
        """
        request = buffer_pb2.HoldersRequest(table=table, limit=limit)
        answer: buffer_pb2.HoldersResponse = await self._ask(self._buffer.Holders, request, _DEADLINE_S)
        return answer

    async def redrive(self, table: str, group_ids: Sequence[str]) -> buffer_pb2.RedriveResponse:
        """Queues prompts of failed groups again; no ids: all that are kept.

        Raises:
            RollmeshError: the mesh does not answer.
        """
        request = buffer_pb2.RedriveRequest(table=table, group_ids=group_ids)
        answer: buffer_pb2.RedriveResponse = await self._ask(self._buffer.Redrive, request, _LEDGER_DEADLINE_S)
        return answer

    async def members(self) -> membership_pb2.ListResponse:
        """All members of the mesh.

        Raises:
            RollmeshError: the mesh does not answer.
        """
        answer: membership_pb2.ListResponse = await self._ask(
            self._membership.List, membership_pb2.ListRequest(), _DEADLINE_S
        )
        return answer

    async def pushes(self, members: Sequence[membership_pb2.Member]) -> weights_pb2.PushesResponse:
        """Generators' reports of the weights, from the learner among the members.

        Raises:
            RollmeshError: the mesh has no learner, or it does not answer.
        """
        address = learner_address(members)
        channel = open_channel(address, self._security)
        try:
            answer: weights_pb2.PushesResponse = await weights_pb2_grpc.WeightsStub(channel).Pushes(
                weights_pb2.PushesRequest(), timeout=_DEADLINE_S
            )
        except grpc.aio.AioRpcError as error:
            raise to_rollmesh_error(error, f"learner {address}") from error
        finally:
            await channel.close()
        return answer

    async def _ask(self, method: Callable[..., Any], request: Message, deadline_s: float) -> Any:
        """Calls a method. Each front is tried once, so that a mesh that does not answer is reported at once."""
        tries = len(self._channel.addresses)
        while True:
            tries -= 1
            try:
                return await method(request, timeout=deadline_s)
            except grpc.aio.AioRpcError as error:
                if not (tries and is_transient(error)):
                    raise to_rollmesh_error(error, f"mesh {self._address}") from error
