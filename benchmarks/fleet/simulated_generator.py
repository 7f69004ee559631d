"""A generator whose engine is scripted; its rollout loop, streams, drafts and heartbeats are those of the product."""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.fleet.scenario import Scenario
from benchmarks.fleet.scripted_source import ScriptedSource, TokenBank
from rollmesh.buffer.client.client import AdmitStream, BufferClient
from rollmesh.generators.engines.types import GenerationResult
from rollmesh.generators.rollout.active_group import ActiveGroup, FinishedMember
from rollmesh.generators.rollout.buffer_streams import AdmissionLoop, LeaseReleaser, WriteStreams
from rollmesh.generators.rollout.capacity import Capacity, CapacitySettings
from rollmesh.generators.rollout.drafts import DraftUploader
from rollmesh.generators.rollout.encoding import member_write
from rollmesh.generators.rollout.rollout_manager import Batch, RolloutHandlers, RolloutManager
from rollmesh.generators.weights.pinned_groups import PinnedGroups
from rollmesh.mesh.access.roles import Identity, Role
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.config.rollout import RolloutSection
from rollmesh.mesh.membership import MembershipAgent
from rollmesh.mesh.rpc.failover_channel import open_mesh
from rollmesh.mesh.runtime.background_tasks import BackgroundTasks
from rollmesh.mesh.runtime.task_group import run_together
from rollmesh.mesh.tables import EVAL, TRAIN
from rollmesh.mesh.trajectory.payload_codec import encode
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2 as pb
from rollmesh.protos import membership_pb2
from rollmesh.protos import trajectory_pb2 as trajectory

TIMEOUT_S = 30.0
RETRY_S = 120.0
_REPORT_S = 2.0
# Seconds between two questions for reward services, as of a generator whose rewards come.
_DISCOVERY_S = 5.0
_DRAFT_TOKENS: int = RolloutSection.model_fields["draft_every_tokens"].default


class Measurements:
    """Measurements by the generators of a process.

    Attributes:
        admission_s: seconds from a credit, when it was stated, to its grant.
        seeded_at: time from which on there are prompts; credits stated before wait for these, not for the buffer.
        stored: trajectories that the buffer acknowledged.
        lost: trajectories that were not needed any more.
    """

    def __init__(self) -> None:
        self.admission_s = array("d")
        self.seeded_at = math.inf
        self.stored = 0
        self.lost = 0

    def pop(self) -> dict[str, Any]:
        """Measurements since the last call."""
        found = {"admission_s": self.admission_s, "stored": self.stored, "lost": self.lost}
        self.admission_s, self.stored, self.lost = array("d"), 0, 0
        return found


class _TimedAdmitStream(AdmitStream):
    """Notes how long each credit waits for its grant."""

    measured: Measurements

    def __init__(self, *args: Any) -> None:
        self._stated: deque[float] = deque()
        super().__init__(*args)

    def update(
        self,
        credits: int | None = None,  # noqa: A002  as in the class above
        serving: PolicyVersion | None = None,
        outstanding: int | None = None,
    ) -> None:
        """States credits, and the time of those that are new."""
        now = time.perf_counter()
        if credits is not None:
            while len(self._stated) > credits:
                self._stated.pop()
            self._stated.extend([now] * (credits - len(self._stated)))
        super().update(credits, serving, outstanding)

    async def __anext__(self) -> pb.GroupGrant:
        grant = await super().__anext__()
        if self._stated and (at := self._stated.popleft()) >= self.measured.seeded_at:
            self.measured.admission_s.append(time.perf_counter() - at)
        return grant


class _TimedClient(BufferClient):
    """A client whose admission to the training table is timed."""

    def __init__(self, channel: Any, measured: Measurements) -> None:
        super().__init__(channel, timeout_s=TIMEOUT_S, retry_s=RETRY_S)
        self._measured = measured

    def admit(self, table: str, member_id: str, generation: int | Callable[[], int]) -> AdmitStream:
        """See `BufferClient`."""
        if table != TRAIN:
            return super().admit(table, member_id, generation)
        stream = _TimedAdmitStream(self._stub, table, member_id, generation, self._retry_s)
        stream.measured = self._measured
        return stream


class SimulatedGenerator:
    """One member of the fleet.

    Args:
        scenario: of the cell.
        number: names it, and decides whether it is slow.
        mesh: addresses of the fronts, with commas.
        bank: the tokens of responses.
        measured: of its process.
    """

    def __init__(
        self,
        scenario: Scenario,
        number: int,
        mesh: str,
        security: SecuritySection,
        bank: TokenBank,
        measured: Measurements,
    ) -> None:
        name = f"generator-{number}"
        self._is_slow = (number * 7919 + scenario.seed) % 1000 < scenario.slow * 1000
        self._measured = measured
        self._channel = open_mesh(mesh, security, Identity(Role.GENERATOR, name))
        self._agent = MembershipAgent(
            self._channel,
            membership_pb2.ROLE_GENERATOR,
            member_id=name,
            address="127.0.0.1:1",
            host_id="fleet",
            timeout_s=TIMEOUT_S,
            retry_s=RETRY_S,
        )
        client = _TimedClient(self._channel, measured)
        self._source = ScriptedSource(bank, scenario.lengths, scenario.seed, scenario.slots, self._on_results)
        capacity = Capacity(CapacitySettings(scenario.slots, {TRAIN: scenario.n, EVAL: scenario.n}, share=1 << 30))
        self._rollout = RolloutManager(self._source, capacity, PinnedGroups())
        self._admission = AdmissionLoop(client, self._agent, self._rollout)
        self._releases = LeaseReleaser(client, self._agent, self._rollout)
        self._writers = WriteStreams(client, self._agent)
        self._drafts = DraftUploader(
            self._source,
            self._rollout,
            partial(self._writers.writer, TRAIN),
            every_s=scenario.draft_every_s,
            every_tokens=_DRAFT_TOKENS,
        )
        self._rollout.connect(
            RolloutHandlers(
                on_batch=self._store,
                on_failed=_fail,
                on_release=self._releases.release,
                on_load=self._admission.refresh,
            )
        )
        self._storing = BackgroundTasks(_reraise)

    async def join(self) -> None:
        """Joins the mesh and takes the version in force into service."""
        await self._agent.start()
        self._agent.on_change(self._serve_newest)
        self._serve_newest()

    async def run(self) -> None:
        """Works until cancelled."""
        await run_together(self._admission.run(), self._drafts.run(), self._report(), self._discover_rewards())

    def set_speed(self, speed: float) -> None:
        """Tokens/s of each response from now on; 0: responses are complete at once."""
        self._source.set_speed(speed / 10 if self._is_slow else speed)

    async def leave(self) -> None:
        """Gives its groups back and leaves, as a generator that is asked to end does."""
        self._rollout.stop_admitting()
        self._rollout.release_unfinished()
        await self._releases.drained()
        await self._agent.leave()
        await self.close()

    async def close(self) -> None:
        """Ends its tasks and its connections."""
        await self._agent.stop()
        self._storing.cancel()
        await self._writers.close()
        await self._channel.close()

    def _serve_newest(self) -> None:
        """Serves the version in force: a transfer of weights takes no time here."""
        if self._agent.policy is not None and self._agent.policy != self._source.serving:
            self._source.serving = self._agent.policy
            self._admission.set_serving(self._agent.policy)

    async def _discover_rewards(self) -> None:
        """Asks for the reward services of the mesh as often as a real generator does; there are none."""
        while True:
            await self._agent.members(membership_pb2.ROLE_REWARD)
            await asyncio.sleep(_DISCOVERY_S)

    async def _report(self) -> None:
        """Keeps the status that heartbeats carry as large as that of a real generator."""
        names = [f"engine_metric_{number}" for number in range(20)]
        while True:
            status = self._source.status()
            gauges = dict.fromkeys(names, float(status.active))
            gauges |= {
                "tokens_generated": float(status.tokens_generated),
                "tokens_for_groups": float(self._source.sampled),
            }
            self._agent.set_status(serving=status.serving, gauges=gauges)
            await asyncio.sleep(_REPORT_S)

    def _on_results(self, results: Sequence[GenerationResult]) -> None:
        self._rollout.on_results(results)

    def _store(self, batch: Batch) -> None:
        for group, members in batch:
            self._storing.spawn(self._write(group, members), "storing members")

    async def _write(self, group: ActiveGroup, members: Sequence[FinishedMember]) -> None:
        writes = [member_write(group, self._meta(group, item), encode(item.result.sampled)) for item in members]
        for result in await self._writers.writer(group.table).write(writes):
            if result.status == pb.WRITE_STATUS_SUPERSEDED:
                self._measured.lost += 1
                self._rollout.drop(group)
            elif result.status == pb.WRITE_STATUS_REJECTED:
                raise AssertionError(f"the buffer refuses a member: {result.field}: {result.message}")
            else:
                self._measured.stored += result.status == pb.WRITE_STATUS_STORED
            self._rollout.on_stored(group, 1)

    def _meta(self, group: ActiveGroup, item: FinishedMember) -> trajectory.MemberMeta:
        sampled = item.result.sampled
        return trajectory.MemberMeta(
            member=item.member,
            outcome=trajectory.OUTCOME_SCORED,
            reward=float(len(sampled) % 2),
            finish_reason=trajectory.FINISH_REASON_STOP,
            prompt_tokens=group.prompt_tokens,
            response_tokens=len(sampled),
            oldest=sampled.versions.oldest._asdict(),
            newest=sampled.versions.newest._asdict(),
            generator=self._agent.member_id,
            finished_unix_ns=item.finished_unix_ns,
        )


def _fail(group: ActiveGroup, _members: list[int], reason: str) -> None:
    raise AssertionError(f"group {group.group_id} cannot be generated: {reason}")


def _reraise(_what: str, error: BaseException) -> None:
    raise error
