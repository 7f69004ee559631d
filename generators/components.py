"""The parts of a running generator and their wiring."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import grpc
from prometheus_client import CollectorRegistry

from rollmesh.buffer.client.client import BufferClient
from rollmesh.generators.agents import AgentRunner, build_runner
from rollmesh.generators.control_service import ManualRequests, Probes
from rollmesh.generators.engines import create_engine
from rollmesh.generators.engines.interface import (
    EngineError,
    EngineListener,
    EngineSettings,
    GenerationResult,
    InferenceEngine,
    KvPolicy,
    TokenEvent,
)
from rollmesh.generators.openai_server.endpoint import Endpoint
from rollmesh.generators.program_agents.runner import ProgramRunner, open_runner
from rollmesh.generators.rollout.active_group import HeldGroup
from rollmesh.generators.rollout.buffer_streams import Admission, Writers
from rollmesh.generators.rollout.credits import fair_share
from rollmesh.generators.rollout.drafts import Drafts
from rollmesh.generators.rollout.encoding import pack
from rollmesh.generators.rollout.response_source import Responder
from rollmesh.generators.rollout.rollout_manager import Rollout
from rollmesh.generators.rollout.submission import Delivery
from rollmesh.generators.tokenizer import TextCodec
from rollmesh.generators.weights import Relay, WeightReceiver
from rollmesh.generators.weights.learner_connection import LearnerLink
from rollmesh.mesh.agent_tools import agent_schemas
from rollmesh.mesh.config.models import Config, SecuritySection
from rollmesh.mesh.errors import RollmeshError
from rollmesh.mesh.membership import MembershipAgent
from rollmesh.mesh.runtime.devices import choose_device
from rollmesh.mesh.runtime.hosts import host_id
from rollmesh.protos import buffer_pb2, weights_pb2
from rollmesh.reward_service.client import build_scorer

log = logging.getLogger(__name__)
# Seconds of a wait for rewards that are worth telling.
_SLOW_S = 5.0


class Parts:
    """Everything between the buffer and the engine.

    Args:
        config: of the run.
        agent: joined.
        channel: to the buffer.
        link: to the learner.
        engine: started.
        text: the model's tokenizer.
        results: where the engine's results arrive.
        relay: serves other generators.
        security: of the mesh, for connections to them.
        on_failure: told what makes it pointless to go on.
        on_report: told what becomes of each version of the weights.
        registry: for the endpoint's figures.

    Attributes:
        endpoint: None where neither an agent nor anybody else needs it; whoever made the parts starts it.
    """

    def __init__(
        self,
        config: Config,
        agent: MembershipAgent,
        channel: grpc.aio.Channel,
        link: LearnerLink,
        *,
        engine: InferenceEngine,
        text: TextCodec,
        results: ResultFeed,
        relay: Relay,
        security: SecuritySection,
        on_failure: Callable[[RollmeshError], None],
        on_report: Callable[[weights_pb2.SwapReport], None],
        registry: CollectorRegistry,
    ) -> None:
        network, rollout = config.network, config.rollout
        self._agent = agent
        self._releases: set[asyncio.Task[None]] = set()
        self.engine = engine
        self.scorer = build_scorer(config)
        self.client = BufferClient(channel, timeout_s=network.rpc_timeout_s, retry_s=network.retry_s)
        responder: Responder = engine
        self.agents: AgentRunner | None = None
        if rollout.agent.kind in ("tools", "environment"):
            responder = self.agents = build_runner(
                config,
                engine,
                text,
                on_results=lambda ended: self.rollout.on_results(ended),
                hold_swap=lambda: self.receiver.hold_swap(),
            )
        self.endpoint: Endpoint | None = None
        if rollout.endpoint.enabled or rollout.agent.kind == "program":
            self.endpoint = Endpoint(config, engine, text, security=security, registry=registry)
        self._programs: ProgramRunner | None = None
        if self.endpoint is not None and rollout.agent.kind == "program":
            responder = self._programs = open_runner(
                rollout.agent,
                self.endpoint,
                on_results=lambda ended: self.rollout.on_results(ended),
                hold_swap=lambda: self.receiver.hold_swap(),
            )
        self.rollout = Rollout(
            responder,
            slots=rollout.slots,
            n_by_table={"train": rollout.n, "eval": config.eval.n},
            share=fair_share(config.learner.batch.groups, config.buffer.max_staleness, rollout.replicas),
            adaptive=rollout.load == "adaptive",
            on_batch=lambda batch: self.delivery.deliver(batch),
            on_failed=lambda group, members, reason: self.delivery.fail(group, members, reason),
            on_release=self._release,
            on_load=self._refresh,
        )
        self.writers = Writers(self.client, agent)
        self.delivery = Delivery(
            member_id=agent.member_id,
            text=text,
            scorer=self.scorer,
            writer_of=self.writers.of,
            upload_side=self.client.upload_side,
            settled=self.rollout.settled,
            dropped=self.rollout.drop,
            on_error=on_failure,
            pack=partial(pack, codec=config.buffer.compression, level=config.buffer.compression_level),
        )
        self.drafts = Drafts(
            responder,
            self.rollout,
            lambda: self.writers.of("train"),
            every_s=rollout.draft_every_s,
            every_tokens=rollout.draft_every_tokens,
        )
        self.admission = Admission(self.client, agent, self.rollout)
        self.receiver = WeightReceiver(
            link,
            engine,
            member_id=agent.member_id,
            run=config.run.name,
            host_id=host_id(),
            transport=config.weights.transport,
            encoding=config.weights.encoding,
            folder=config.weights.dir,
            timeout_s=config.weights.timeout_s,
            streams=config.weights.streams,
            security=security,
            relay=relay,
            before_swap=self.rollout.pinned_done,
            on_serving=self.admission.serve,
            on_report=on_report,
        )
        self.probes = Probes(engine, self.receiver.manifest)
        self.manual = ManualRequests(engine, text)
        results.connect(self._take, self.endpoint.take_tokens if self.endpoint is not None else None)

    @property
    def episodes(self) -> Mapping[str, float] | None:
        """Counts of episodes, by name; None without agents."""
        runner = self.agents or self._programs
        return runner.figures if runner is not None else None

    def _take(self, results: list[GenerationResult]) -> None:
        """What the engine has finished goes to whoever asked for it."""
        others = self.manual.take(results)
        if self.agents is not None:
            others = self.agents.take(others)
        if self.endpoint is not None:
            others = self.endpoint.take(others)
        if others:
            self.rollout.on_results(others)

    def _refresh(self) -> None:
        self.admission.refresh()

    def waiting_reason(self) -> str:
        """Why no tokens are being sampled, or no results stored, at present; empty while all goes well."""
        if self.receiver.serving is None:
            return self.receiver.waiting_reason
        if reason := self.rollout.waiting_reason:
            return reason
        load = self.rollout.load
        if load.undelivered and (reason := self.scorer.waiting_reason()):
            return f"waits for rewards: {reason}"
        members, longest_s = self.delivery.waiting_for_rewards()
        if longest_s >= _SLOW_S:
            return f"waits for rewards: {members} responses, the first of them for {longest_s:.0f} s"
        if load.undelivered and not load.generating:
            return f"waits until {load.undelivered} members are scored and stored"
        if load.generating == 0 and self.rollout.held == 0:
            return self.admission.waiting_reason()
        return ""

    async def releases_sent(self) -> None:
        """Waits until what was given back has been told to the buffer."""
        while self._releases:
            await asyncio.wait(self._releases)

    async def close(self) -> None:
        """Ends everything but the engine; what is under way is given up."""
        for task in self._releases:
            task.cancel()
        await self.delivery.close()
        await self.writers.close()
        await self.scorer.close()
        await self.receiver.close()
        if self.agents is not None:
            await self.agents.close()
        if self._programs is not None:
            await self._programs.close()
        if self.endpoint is not None:
            await self.endpoint.close()

    def _release(self, groups: Sequence[HeldGroup]) -> None:
        task = asyncio.get_running_loop().create_task(self._send_release(groups))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _send_release(self, groups: Sequence[HeldGroup]) -> None:
        by_table: dict[str, list[buffer_pb2.LeaseRef]] = {}
        for group in groups:
            by_table.setdefault(group.table, []).append(group.lease)
        try:
            for table, leases in by_table.items():
                await self._release_of(table, leases)
        finally:
            self.rollout.released(groups)

    async def _release_of(self, table: str, leases: Sequence[buffer_pb2.LeaseRef]) -> None:
        try:
            await self.client.release(table, self._agent.member_id, self._agent.generation, leases)
        except RollmeshError as error:
            log.warning("%d leases of %s end when they are not named: %s", len(leases), table, error.message)


class ResultFeed(EngineListener):
    """Carries what the engine's thread says to the event loop: one wake-up per decode step that has something to say.

    Args:
        on_failure: told, in the event loop's thread, what ended the engine.
    """

    def __init__(self, on_failure: Callable[[RollmeshError], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._take: Callable[[list[GenerationResult]], None] = _nobody
        self._take_tokens: Callable[[list[TokenEvent]], None] = _nobody
        self._take_failure = on_failure

    def connect(
        self,
        take: Callable[[list[GenerationResult]], None],
        take_tokens: Callable[[list[TokenEvent]], None] | None = None,
    ) -> None:
        """Names who takes results, and tokens of streamed requests, in the event loop's thread."""
        self._take = take
        self._take_tokens = take_tokens or self._take_tokens

    def disconnect(self) -> None:
        """What comes from here on is no one's."""
        self._take = self._take_tokens = _drop

    def on_results(self, results: list[GenerationResult]) -> None:
        """For the engine."""
        self._loop.call_soon_threadsafe(self._deliver, results)

    def on_tokens(self, events: list[TokenEvent]) -> None:
        """For the engine."""
        self._loop.call_soon_threadsafe(self._deliver_tokens, events)

    def on_failure(self, error: EngineError) -> None:
        """For the engine."""
        self._loop.call_soon_threadsafe(self._take_failure, error)

    def _deliver(self, results: list[GenerationResult]) -> None:
        self._take(results)

    def _deliver_tokens(self, events: list[TokenEvent]) -> None:
        self._take_tokens(events)


def _nobody(what: Sequence[object]) -> None:
    raise AssertionError(f"{len(what)} results or events that nobody has asked for")


def _drop(what: Sequence[object]) -> None:
    log.debug("%d results or events came after the end", len(what))


def load_libraries(threads: int) -> None:
    """Imports the heavy packages, which takes seconds, and sets torch's intra-op threads."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    # transformers imports what is behind a name when the name is first asked for.
    for name in ("AutoModelForCausalLM", "AutoTokenizer", "PreTrainedModel"):
        getattr(transformers, name)


def load_engine(
    config: Config, folder: Path, listener: EngineListener, *, threads: int
) -> tuple[InferenceEngine, TextCodec]:
    """Builds engine and tokenizer from the model files; takes seconds.

    Args:
        config: of the run.
        folder: configuration and tokenizer files of the model.
        listener: see `EngineListener`.
        threads: compute threads.

    Raises:
        ConfigError, DataError: the engine or the model cannot be built.
    """
    rollout = config.rollout
    device = choose_device(rollout.device, "rollout.device")
    settings = EngineSettings(
        slots=rollout.slots,
        dtype=config.model.dtype,
        context=rollout.context_tokens,
        kv=kv_policy(config),
        device=device,
        sharing=sharing(config, device),
        seed=config.run.seed,
        threads=threads,
        allow_insecure=config.security.allow_insecure,
        hf=rollout.hf,
        vllm=rollout.vllm,
        sglang=rollout.sglang,
    )
    # Users' modules are imported here, where it may take its time; who needs them finds them loaded.
    agent_schemas(rollout.agent)
    return create_engine(rollout.engine, folder, settings, listener), TextCodec(folder)


def kv_policy(config: Config) -> KvPolicy:
    """What becomes of running sequences at a swap."""
    if config.weights.kv != "auto":
        return config.weights.kv
    return "recompute" if config.rollout.engine == "sglang" else "keep"


def sharing(config: Config, device: str) -> int:
    """Most processes of the run that share one device's memory: on a CPU its generators, else those that are named."""
    rollout, learner = config.rollout, config.learner
    if device == "cpu":
        return max(1, rollout.replicas)
    if not rollout.devices:
        return 1
    users = Counter([*rollout.devices, *(learner.devices or ())])
    return max(users[number] for number in rollout.devices)
