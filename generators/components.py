"""The components of a running generator and their wiring.

From the buffer to the engine and back:

- `AdmissionLoop` keeps the Admit streams and feeds their grants to `RolloutManager`: the groups in progress.
- `RolloutManager` asks the engine, or agents that use it (`AgentRunner`, `ProgramRunner`), for responses.
- `TrajectorySubmitter` scores and stores finished members; `DraftUploader` stores the beginnings of unfinished ones.
- `LeaseReleaser` gives groups back.
- `WeightReceiver` keeps the engine on the newest weights; `PinnedGroups` are what a swap waits for.
- `Endpoint`, `ManualRequests` and `Probes` answer requests to the generator itself.

Where two components need each other, the one that is built first is connected last (`connect`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import grpc

from rollmesh.buffer.client.client import BufferClient
from rollmesh.generators.agents import AgentRunner, build_runner
from rollmesh.generators.control_service import ManualRequests, Probes
from rollmesh.generators.engine_loading import LoadedEngine
from rollmesh.generators.engines.types import GenerationResult
from rollmesh.generators.metrics import GeneratorMetrics
from rollmesh.generators.openai_server.endpoint import Endpoint
from rollmesh.generators.program_agents.runner import ProgramRunner, open_runner
from rollmesh.generators.rollout.awake_clock import AwakeClock
from rollmesh.generators.rollout.buffer_streams import AdmissionLoop, LeaseReleaser, WriteStreams
from rollmesh.generators.rollout.capacity import Capacity, CapacitySettings
from rollmesh.generators.rollout.credits import group_share
from rollmesh.generators.rollout.drafts import DraftUploader
from rollmesh.generators.rollout.member_spans import MemberSpans
from rollmesh.generators.rollout.rollout_manager import RolloutHandlers, RolloutManager
from rollmesh.generators.rollout.submission import TrajectorySubmitter
from rollmesh.generators.weights import Relay, WeightReceiver
from rollmesh.generators.weights.learner_connection import LearnerDirectory
from rollmesh.generators.weights.pinned_groups import PinnedGroups
from rollmesh.generators.weights.receiver import ReceiverSettings
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import RollmeshError
from rollmesh.mesh.membership import MembershipAgent
from rollmesh.mesh.tables import EVAL, TRAIN
from rollmesh.mesh.telemetry.tracing import Tracer, no_traces
from rollmesh.mesh.trajectory.payload_codec import encode
from rollmesh.mesh.wait import NO_WAIT, Wait
from rollmesh.protos import weights_pb2
from rollmesh.reward_service.client.client import build_scorer

# Seconds that a service has to say that a promised reward is late.
_LATE_SLACK_S = 60.0
# Seconds of a wait for rewards that are worth reporting.
_SLOW_S = 5.0


@dataclass(frozen=True, slots=True)
class MeshAccess:
    """Access to the rest of the mesh, and from there.

    Attributes:
        agent: joined.
        channel: to the buffer.
        security: for the channels it opens.
        relay: serves other generators what this one receives.
        tracer: of trajectories.
    """

    agent: MembershipAgent
    channel: grpc.aio.Channel
    security: SecuritySection
    relay: Relay
    tracer: Tracer = field(default_factory=no_traces)


class GeneratorComponents:
    """Everything between the buffer and the engine.

    Args:
        config: of the run.
        mesh: joined.
        directory: leads to the learner.
        loaded: the engine, started.
        metrics: of the generator.
        on_failure: called with a permanent failure.
        clock: for the time that episodes may take.
        asleep: nothing is admitted, and no weights are fetched, for now.

    Attributes:
        endpoint: None where neither an agent nor a client needs it; it is started after the components are built.
    """

    def __init__(
        self,
        config: Config,
        mesh: MeshAccess,
        directory: LearnerDirectory,
        loaded: LoadedEngine,
        *,
        metrics: GeneratorMetrics,
        on_failure: Callable[[RollmeshError], None],
        clock: AwakeClock,
        asleep: bool = False,
    ) -> None:
        network, agent = config.network, mesh.agent
        self.engine, text = loaded.engine, loaded.text
        self.scorer = build_scorer(config)
        self.client = BufferClient(mesh.channel, timeout_s=network.rpc_timeout_s, retry_s=network.retry_s)
        self.endpoint, self.agents, self._programs = _build_episodes(config, mesh, loaded, metrics, clock)
        episodes = self.agents or self._programs
        source = episodes or self.engine
        pinned = PinnedGroups()
        capacity = _build_capacity(config)
        capacity.asleep = asleep
        self.rollout = RolloutManager(source, capacity, pinned, episodes=episodes is not None)
        if episodes is not None:
            episodes.connect(self.rollout.on_results)
        self.writers = WriteStreams(self.client, agent)
        spans = MemberSpans(mesh.tracer)

        def on_report(report: weights_pb2.SwapReport) -> None:
            metrics.record_swap(report)
            spans.weights_came(report)

        self.submitter = TrajectorySubmitter(
            generator_id=agent.member_id,
            run=agent.run_name,
            text=text,
            scorer=self.scorer,
            store=self.writers,
            owner=self.rollout,
            on_error=on_failure,
            encode=partial(encode, codec=config.buffer.compression, level=config.buffer.compression_level),
            spans=spans,
            late_s=config.reward.late.timeout_s + _LATE_SLACK_S,
        )
        self.drafts = DraftUploader(
            source,
            self.rollout,
            partial(self.writers.writer, TRAIN),
            every_s=config.rollout.draft_every_s,
            every_tokens=config.rollout.draft_every_tokens,
        )
        self.admission = AdmissionLoop(self.client, agent, self.rollout)
        self.releases = LeaseReleaser(self.client, agent, self.rollout)
        self.rollout.connect(
            RolloutHandlers(
                on_batch=self.submitter.submit,
                on_failed=self.submitter.fail,
                on_release=self.releases.release,
                on_load=self.admission.refresh,
                whole_groups=lambda: self.scorer.needs_group,
            )
        )
        self.receiver = WeightReceiver(
            directory,
            self.engine,
            ReceiverSettings.for_member(config, agent.member_id, mesh.security),
            relay=mesh.relay,
            pinned=pinned,
            on_serving=self.admission.set_serving,
            on_report=on_report,
            suspended=asleep,
        )
        self.probes = Probes(self.engine, self.receiver.announced, metrics.record_verification)
        self.manual = ManualRequests(self.engine, text)
        loaded.events.connect(self._route_results, self.endpoint.accept_tokens if self.endpoint is not None else None)

    @property
    def episodes(self) -> Mapping[str, float] | None:
        """Counts of episodes, by name; None without agents."""
        runner = self.agents or self._programs
        return runner.stats if runner is not None else None

    def _route_results(self, results: list[GenerationResult]) -> None:
        """Passes each result of the engine to the component that requested it."""
        others = self.manual.accept_results(results)
        if self.agents is not None:
            others = self.agents.accept_results(others)
        if self.endpoint is not None:
            others = self.endpoint.accept_results(others)
        if others:
            self.rollout.on_results(others)

    def present_wait(self) -> Wait:
        """The reason why no tokens are sampled, or no results stored, at present; empty while all is well."""
        if self.receiver.serving is None:
            return Wait(self.receiver.waiting_reason)
        if reason := self.rollout.capacity.waiting_reason:
            return Wait(reason)
        load = self.rollout.capacity.load
        members, longest_s = self.submitter.waiting_for_rewards()
        if members and (wait := self.scorer.present_wait()):
            return replace(wait, reason=f"waits for rewards: {wait.reason}")
        if longest_s >= _SLOW_S:
            return Wait(f"waits for rewards: {members} responses, the first of them for {longest_s:.0f} s")
        if load.undelivered and not load.generating:
            return Wait(f"waits until {load.undelivered} responses are scored and stored")
        if load.generating == 0 and self.rollout.active_groups == 0:
            return Wait(self.admission.waiting_reason())
        return NO_WAIT

    async def close(self) -> None:
        """Ends everything but the engine; unfinished work is abandoned."""
        self.releases.close()
        await self.submitter.close()
        await self.writers.close()
        await self.scorer.close()
        await self.receiver.close()
        if self.agents is not None:
            await self.agents.close()
        if self._programs is not None:
            await self._programs.close()
        if self.endpoint is not None:
            await self.endpoint.close()


def _build_episodes(
    config: Config, mesh: MeshAccess, loaded: LoadedEngine, metrics: GeneratorMetrics, clock: AwakeClock
) -> tuple[Endpoint | None, AgentRunner | None, ProgramRunner | None]:
    """The endpoint and the agents that a configuration asks for, of the latter one kind at most."""
    section, engine, text = config.rollout, loaded.engine, loaded.text
    endpoint = None
    if section.endpoint.enabled or section.agent.kind == "program":
        endpoint = Endpoint(config, engine, text, security=mesh.security, registry=metrics.registry)
    if section.agent.kind in ("tools", "environment"):
        return endpoint, build_runner(config, engine, text, clock), None
    if endpoint is not None and section.agent.kind == "program":
        return endpoint, None, open_runner(section.agent, endpoint, clock)
    return endpoint, None, None


def _build_capacity(config: Config) -> Capacity:
    section = config.rollout
    share = group_share(config.learner.batch.groups, config.buffer.max_staleness, section.replicas)
    n_by_table = {TRAIN: section.n, EVAL: config.eval.n}
    return Capacity(CapacitySettings(section.slots, n_by_table, share, adaptive=section.load == "adaptive"))
