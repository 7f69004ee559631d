"""The parts of a running generator and their wiring."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import grpc

from buffer.client import BufferClient
from generators.admission import fair_share
from generators.control import ManualRequests, Probes
from generators.delivery import Delivery
from generators.drafts import Drafts
from generators.engines import create_engine
from generators.engines.base import GenerationResult, InferenceEngine
from generators.held import HeldGroup
from generators.learner_link import LearnerLink
from generators.packing import pack
from generators.rollout import Rollout
from generators.streams import Admission, Writers
from generators.text import TextCodec
from generators.weights import Relay, WeightReceiver
from mesh.config.models import Config, SecuritySection
from mesh.errors import RollmeshError
from mesh.hosts import host_id
from mesh.membership import MembershipAgent
from protos import buffer_pb2, weights_pb2
from reward_service.client import build_scorer

log = logging.getLogger(__name__)


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
    ) -> None:
        network, rollout = config.network, config.rollout
        self._agent = agent
        self._releases: set[asyncio.Task[None]] = set()
        self.engine = engine
        self.scorer = build_scorer(config)
        self.client = BufferClient(channel, timeout_s=network.rpc_timeout_s, retry_s=network.retry_s)
        self.rollout = Rollout(
            engine,
            slots=rollout.slots,
            n_by_table={"train": rollout.n, "eval": config.eval.n},
            share=fair_share(config.learner.batch.groups, config.buffer.max_staleness, rollout.replicas),
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
            settled=self.rollout.settled,
            dropped=self.rollout.drop,
            on_error=on_failure,
            pack=partial(pack, codec=config.buffer.compression, level=config.buffer.compression_level),
        )
        self.drafts = Drafts(
            engine,
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
        results.connect(lambda batch: self.rollout.on_results(self.manual.take(batch)))

    def _refresh(self) -> None:
        self.admission.refresh()

    def waiting_reason(self) -> str:
        """Why no tokens are being sampled, or no results stored, at present; empty while all goes well."""
        if self.receiver.serving is None:
            return self.receiver.waiting_reason
        load = self.rollout.load
        if load.undelivered and (reason := self.scorer.waiting_reason()):
            return f"waits for rewards: {reason}"
        if load.generating == 0 and self.rollout.held == 0:
            return self.admission.waiting_reason()
        return ""

    async def releases_sent(self) -> None:
        """Waits until what was given back has been told to the buffer."""
        while self._releases:
            await asyncio.wait(self._releases)

    async def close(self) -> None:
        """Ends everything; what is under way is given up."""
        for task in self._releases:
            task.cancel()
        await self.delivery.close()
        await self.writers.close()
        await self.scorer.close()
        await self.receiver.close()
        await asyncio.to_thread(self.engine.stop)

    def _release(self, groups: Sequence[HeldGroup]) -> None:
        task = asyncio.get_running_loop().create_task(self._send_release(groups))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _send_release(self, groups: Sequence[HeldGroup]) -> None:
        by_table: dict[str, list[buffer_pb2.LeaseRef]] = {}
        for group in groups:
            by_table.setdefault(group.table, []).append(group.lease)
        for table, leases in by_table.items():
            try:
                await self.client.release(table, self._agent.member_id, self._agent.generation, leases)
            except RollmeshError as error:
                log.warning("%d leases of %s run out by themselves: %s", len(leases), table, error.message)


class ResultFeed:
    """Carries results from the engine's thread to the event loop: one wake-up per decode step."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._take: Callable[[list[GenerationResult]], None] = _nobody

    def connect(self, take: Callable[[list[GenerationResult]], None]) -> None:
        """Names who takes them, in the event loop's thread."""
        self._take = take

    def on_results(self, results: list[GenerationResult]) -> None:
        """For the engine."""
        self._loop.call_soon_threadsafe(self._deliver, results)

    def _deliver(self, results: list[GenerationResult]) -> None:
        self._take(results)


def _nobody(results: list[GenerationResult]) -> None:
    raise AssertionError(f"{len(results)} results before anything was asked for")


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
    config: Config, folder: Path, results: ResultFeed, on_failure: Callable[[RollmeshError], None]
) -> tuple[InferenceEngine, TextCodec]:
    """Builds engine and tokenizer from the model files; takes seconds.

    Args:
        on_failure: called in the engine's thread.

    Raises:
        ConfigError, DataError: the engine or the model cannot be built.
    """
    engine = create_engine(
        config.rollout.engine,
        folder,
        slots=config.rollout.slots,
        dtype=config.model.dtype,
        on_results=results.on_results,
        on_failure=on_failure,
        kv=config.weights.kv,
        device=_device(config),
        seed=config.run.seed,
    )
    return engine, TextCodec(folder)


def _device(config: Config) -> str:
    import torch

    return "cuda" if config.learner.device != "cpu" and torch.cuda.is_available() else "cpu"
