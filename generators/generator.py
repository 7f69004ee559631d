"""The life of one generator in a mesh it has joined.

Invariants: nothing is admitted before verified weights are in service. An end in order finishes what is nearly done,
drafts the rest, releases it and leaves. SIGTERM asks for one, Drain, and a notice that the machine is taken away. A
permanent failure ends the service with its error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from rollmesh.generators.components import GeneratorComponents, MeshAccess
from rollmesh.generators.control_service import ManualRequests, Probes
from rollmesh.generators.drain_times import DrainTimes
from rollmesh.generators.engine_events import EngineEventBridge
from rollmesh.generators.engine_loading import load_engine, load_libraries, release_here
from rollmesh.generators.engine_watch import watch
from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.types import EngineStatus
from rollmesh.generators.metrics import GeneratorMetrics
from rollmesh.generators.model_bundle import fetch_model_bundle
from rollmesh.generators.placement.device_turns import DeviceTurns
from rollmesh.generators.placement.turn_actions import SleepRules, TurnParts
from rollmesh.generators.rollout.silent_wait import SilenceClock
from rollmesh.generators.weights.learner_connection import LearnerDirectory
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import RollmeshError, UnauthenticatedError, UnreachableError
from rollmesh.mesh.runtime.devices import choose_device
from rollmesh.mesh.runtime.memory_tuning import freeze_heap
from rollmesh.mesh.runtime.scratch_folder import scratch_folder
from rollmesh.mesh.runtime.service import Shutdown
from rollmesh.mesh.runtime.task_group import run_together
from rollmesh.mesh.wait import Wait
from rollmesh.protos import membership_pb2
from rollmesh.reward_service.client.client import RewardScorer, needs_discovery

log = logging.getLogger(__name__)
_REPORT_INTERVAL_S = 1.0
# Seconds between two queries for reward services; and while none answers, from the first pause to the longest.
_DISCOVERY_S = 5.0
_SEARCH_S = (0.5, 2.0)
# Seconds in which what is finished is stored, or given back, after an engine has failed.
_STORE_S = 5.0


class Generator:
    """A generator at work.

    Args:
        config: of the run.
        mesh: joined.
        threads: compute threads.
        host, advertise: where this process listens, and under which name others reach it.
        shares_devices: it sleeps while the learner has its devices, from the start on.
        drain: times of an end in order, if the request for it says nothing else.

    Attributes:
        engine_name: `rollout.engine`.
        context: tokens that prompt and response may have together.
        metrics: for Prometheus.
        turns: its sleep.
    """

    def __init__(
        self,
        config: Config,
        mesh: MeshAccess,
        *,
        threads: int,
        host: str,
        advertise: str | None,
        shares_devices: bool,
        drain: DrainTimes,
    ) -> None:
        self._config = config
        self._mesh = mesh
        self._agent = mesh.agent
        self._threads = threads
        self._listen_at = host, advertise
        self._loop = asyncio.get_running_loop()
        self._stage = "waits for a learner"
        self._drain_times = drain
        self._failure: asyncio.Future[None] = self._loop.create_future()
        # A waiter that is cancelled cancels the future too.
        self._failed_with: RollmeshError | None = None
        self._components: GeneratorComponents | None = None
        self._files: Path
        self.engine_name = config.rollout.engine
        self.context = config.rollout.context_tokens
        self.metrics = GeneratorMetrics()
        rules = _sleep_rules(config) if shares_devices else SleepRules(shares_devices=False)
        self.turns = DeviceTurns(rules, lambda: self._agent.policy, self._ask_mesh, self._fail)

    @property
    def weights_transport(self) -> str:
        """The transport that brings the weights, and the reasons against cheaper ones; empty before there are any."""
        return self._components.receiver.chosen.text if self._components is not None else ""

    @property
    def manual(self) -> ManualRequests | None:
        """Answers prompts by hand, after a sleep where it sleeps; None before there are weights."""
        components = self._components
        return components.manual if components is not None and components.receiver.has_weights.is_set() else None

    @property
    def probes(self) -> Probes | None:
        """Probes the weights in service; None before there are weights."""
        components = self._components
        return components.probes if components is not None and components.receiver.serving is not None else None

    def snapshot(self) -> tuple[EngineStatus | None, int, str]:
        """The engine's status (None before there is one), groups held, and why it waits."""
        if self._components is None:
            return None, 0, self._stage
        return (
            self._components.engine.status(),
            self._components.rollout.active_groups,
            self._present_wait(self._components).reason,
        )

    def drain_within(self, timeout_s: float) -> None:
        """Bounds the time that running sequences get at the end."""
        self._drain_times = replace(self._drain_times, running_s=timeout_s)

    async def run(self, shutdown: Shutdown) -> None:
        """Works until asked to end, the run is over, or something fails for good.

        Raises:
            RollmeshError: what failed.
        """
        agent = self._agent
        work = asyncio.create_task(self._work(), name="generator")
        ends = [asyncio.create_task(event.wait()) for event in (shutdown.requested, agent.run_finished, agent.lost)]
        try:
            await asyncio.wait({work, *ends}, return_when=asyncio.FIRST_COMPLETED)
            finished = agent.run_finished.is_set()
            log.info("ending: %s", "the run is finished" if finished else shutdown.reason or "something failed")
            # Nothing of a finished run is needed any more.
            if self._components is not None and shutdown.requested.is_set() and not finished:
                left_s = shutdown.within_s
                await self._drain(self._components, self._drain_times if left_s is None else DrainTimes.within(left_s))
        finally:
            for end in ends:
                end.cancel()
            await self.turns.close()
            work.cancel()
            await asyncio.wait({work})
        if not work.cancelled() and (error := work.exception()) is not None:
            raise error
        if agent.lost_error is not None:
            raise agent.lost_error

    async def _work(self) -> None:
        async with AsyncExitStack() as stack:
            components = await self._build(stack)
            freeze_heap()
            self._components = components
            self._stage = ""
            self.turns.attach(TurnParts(components.engine, components.rollout, components.receiver, components.drafts))
            try:
                await run_together(
                    components.receiver.run(),
                    self._admit(components),
                    components.drafts.run(),
                    self._discover_rewards(components.scorer),
                    components.scorer.share_judge(self._agent, membership_pb2.ROLE_GENERATOR, self._config.run.folder),
                    self._report(components),
                    self._end_on_failure(),
                    watch(components.engine, self._config.resources.frozen_after_s),
                )
            except RollmeshError:
                await self._fail_culprit(components)
                raise

    async def _build(self, stack: AsyncExitStack) -> GeneratorComponents:
        config, network, agent = self._config, self._config.network, self._agent
        directory = LearnerDirectory(agent, self._mesh.security, max_message_mb=network.max_message_mb)
        stack.push_async_callback(directory.close)
        await self._enter_stage("waits for a learner", directory)
        results = EngineEventBridge(self._fail)
        # Loading the libraries takes as long as a learner needs to come up: both at the same time.
        libraries = asyncio.create_task(asyncio.to_thread(load_libraries, self._threads))
        # The thread itself cannot be ended: the process ends without it (`generators.service.run`).
        stack.callback(libraries.cancel)
        folder = stack.enter_context(scratch_folder("rollmesh-model-"))
        await fetch_model_bundle(directory, folder, timeout_s=network.rpc_timeout_s, retry_s=network.retry_s)
        if self.turns.asleep:
            await self._enter_stage(self.turns.waiting_reason, directory)
            await self.turns.wanted.wait()
        await self._enter_stage("loads the model", directory)
        await libraries
        loaded = await asyncio.to_thread(
            load_engine,
            config,
            folder,
            results,
            threads=self._threads,
            release=self.turns.release if self.turns.shares_devices else None,
        )
        # The engine ends last, whatever becomes of the components. A thread of it that hung may still come to itself.
        stack.callback(results.disconnect)
        stack.push_async_callback(asyncio.to_thread, loaded.engine.stop)
        loaded.engine.start()
        components = GeneratorComponents(
            config,
            self._mesh,
            directory,
            loaded,
            metrics=self.metrics,
            on_failure=self._fail,
            clock=self.turns.clock,
            asleep=self.turns.asleep,
        )
        stack.push_async_callback(components.close)
        await components.scorer.start()
        if components.endpoint is not None:
            await components.endpoint.start(*self._listen_at)
            agent.set_status(endpoint=components.endpoint.server.url)
        self._files = folder
        return components

    async def _enter_stage(self, stage: str, directory: LearnerDirectory) -> None:
        """Reports the stage of its start ahead of the next heartbeat: stages are as long as a model is large."""
        self._stage = stage
        self._agent.set_status(wait=Wait(stage))
        await directory.refresh()

    async def _admit(self, components: GeneratorComponents) -> None:
        await components.receiver.has_weights.wait()
        # Engines with processes of their own read them when these come up; an engine with weights has read them.
        if self.turns.release == "memory":
            await asyncio.to_thread(shutil.rmtree, self._files, ignore_errors=True)
        await components.admission.run()

    # ------------------------------------------------------------------------------------------------ failure

    async def _ask_mesh(self) -> None:
        # The heartbeats, which meet the same failures, judge them.
        with contextlib.suppress(grpc.aio.AioRpcError, UnauthenticatedError, UnreachableError):
            await self._agent.heartbeat()

    def _fail(self, error: RollmeshError) -> None:
        self._failed_with = self._failed_with or error
        if not self._failure.done():
            self._failure.set_exception(error)

    async def _end_on_failure(self) -> None:
        await self._failure

    async def _fail_culprit(self, components: GeneratorComponents) -> None:
        """Fails the group of the request at which the engine has ended, and releases all others.

        A release costs them no attempt. The culprit would end every engine that gets it.
        """
        error = self._failed_with
        if not isinstance(error, EngineError) or not error.culprit:
            return
        rollout, why = components.rollout, error.message.partition("\n")[0]
        if error.raised:
            why += f"; the last error in its log: {error.raised}"
        rollout.stop_admitting()
        rollout.fail_request(error.culprit, f"the engine ended at it, tried alone: {why}")
        rollout.flush_finished()
        await _done_within(_STORE_S, components.submitter.drained())
        rollout.release_all()
        await _done_within(_STORE_S, components.releases.drained())

    # ------------------------------------------------------------------------------------------------ the end

    async def _drain(self, components: GeneratorComponents, times: DrainTimes) -> None:
        """Stops admitting, lets sequences finish, stores them, drafts and releases the rest."""
        rollout, submitter = components.rollout, components.submitter
        rollout.stop_admitting()
        # Asleep nothing finishes.
        if await _done_within(0.0 if self.turns.asleep else times.running_s, rollout.idle.wait()):
            return
        # A group is given back after its finished members and drafts are stored: they would be superseded otherwise.
        rollout.flush_finished()
        # Rewards that are late do not keep the rest from being drafted.
        stored = await _done_within(times.storing_s, submitter.drained())
        drafted = await _done_within(times.storing_s, components.drafts.write_all())
        rollout.release_all()
        released = await _done_within(times.storing_s, components.releases.drained())
        if not (stored and drafted and released):
            log.warning("%d groups were not stored or given back in time; their leases run out", rollout.active_groups)

    # ------------------------------------------------------------------------------------ background tasks

    async def _report(self, components: GeneratorComponents) -> None:
        """Keeps the heartbeat's gauges and the metrics up to date."""
        silence = SilenceClock()
        while True:
            status = components.engine.status()
            # Silence of a generator that sleeps is no sign of overload or of an engine that is stuck.
            now_s = self.turns.clock.time()
            silent = silence.reason(
                tokens=status.tokens_for_groups,
                generating=components.rollout.capacity.load.generating,
                now_s=now_s,
            )
            components.rollout.observe(status, now_s)
            values = self.metrics.update(
                status, components.rollout, components.submitter, components.drafts, self.turns, components.episodes
            )
            wait = self._present_wait(components) or Wait(silent)
            self._agent.set_status(serving=components.receiver.serving, gauges=values, wait=wait)
            await asyncio.sleep(_REPORT_INTERVAL_S)

    def _present_wait(self, components: GeneratorComponents) -> Wait:
        """The reason why no tokens are sampled, or no results stored, at present; empty while all is well."""
        return Wait(self.turns.waiting_reason) or components.present_wait()

    async def _discover_rewards(self, scorer: RewardScorer) -> None:
        """Keeps the scorer's endpoints equal to the reward services of the mesh, where the configuration names none."""
        if not needs_discovery(self._config):
            return
        known: set[str] = set()
        shortest_s, longest_s = _SEARCH_S
        search_s = shortest_s
        while True:
            members = await self._agent.members(membership_pb2.ROLE_REWARD)
            addresses = {member.address for member in members if member.address}
            if addresses != known:
                log.info("reward services: %s", ", ".join(sorted(addresses)) or "none")
                scorer.set_endpoints(sorted(addresses))
                known = addresses
            if known and not scorer.present_wait():
                search_s = shortest_s
                await asyncio.sleep(_DISCOVERY_S)
            else:
                await asyncio.sleep(search_s)
                search_s = min(2 * search_s, longest_s)


def _sleep_rules(config: Config) -> SleepRules:
    """Those of a generator that shares its devices."""
    device = choose_device(config.rollout.device, "rollout.device")
    return SleepRules(True, release_here(config), config.model.dtype, device)


async def _done_within(timeout_s: float, coroutine: Coroutine[Any, Any, Any]) -> bool:
    """Awaits it; False where the time ran out first, and it was cancelled."""
    try:
        await asyncio.wait_for(coroutine, timeout_s)
    except TimeoutError:
        return False
    return True
