"""The steps of a swap: ranks move their models by orders, generators sleep and wake over gRPC.

A step is taken in the training thread. While generators are awaited, the other ranks wait in turns.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

import numpy as np

from rollmesh.learner.distributed.rank_group import wait_keeping_alive
from rollmesh.learner.placement.generator_group import GeneratorGroup, GroupAnswer, Probe
from rollmesh.learner.placement.swap import Phase, SwapMachine
from rollmesh.learner.runtime import LearnerRuntime
from rollmesh.mesh.errors import FencedError, RollmeshError, SwapError
from rollmesh.protos import generator_pb2

log = logging.getLogger(__name__)
# Beyond a step's own deadline, until its coroutine has ended.
_GRACE_S = 30.0
_SLEEP = {
    Phase.FREEZING: generator_pb2.SLEEP_LEVEL_FROZEN,
    Phase.RELEASING: generator_pb2.SLEEP_LEVEL_WITHOUT_WEIGHTS,
}
_WAKE = {
    Phase.WAKING: generator_pb2.WAKE_STEP_MEMORY,
    Phase.LOADING: generator_pb2.WAKE_STEP_WEIGHTS,
    Phase.VERIFYING: generator_pb2.WAKE_STEP_VERIFIED,
    Phase.RESUMING: generator_pb2.WAKE_STEP_GENERATING,
}
_AWAITED = {
    Phase.FREEZING: "to stop generating",
    Phase.RELEASING: "to give memory back",
    Phase.WAKING: "to take memory again",
    Phase.LOADING: "to load the weights",
    Phase.VERIFYING: "to verify the weights",
    Phase.RESUMING: "to generate",
}


class Versions(Protocol):
    """The versions that generators load: `learner.coordinator.version_announcer.VersionAnnouncer`."""

    def wait_in_force(self) -> None:
        """Waits until the last version is in force."""
        ...


class SwapSteps:
    """Takes the steps that a swap consists of.

    Args:
        runtime: of rank 0.
        generators: that share the devices.
        versions: what they load.
        machine: says how long a step may take.
        probe_ids: tokens by which generators prove the weights that they have loaded; empty: by the bytes alone.

    Attributes:
        freed: metrics of what the last swap has given back, in bytes.
    """

    def __init__(
        self,
        runtime: LearnerRuntime,
        generators: GeneratorGroup,
        versions: Versions,
        machine: SwapMachine,
        probe_ids: Sequence[int],
    ) -> None:
        self._bridge = runtime.bridge
        self._ranks = runtime.ranks
        self._status = runtime.status
        self._generators = generators
        self._versions = versions
        self._machine = machine
        self._probe_ids = probe_ids
        self._probe = Probe()
        self._proofs: set[str] = set()
        # Generators that are left out of the rest of an attempt to wake all.
        self._late: set[str] = set()
        self._waking: Future[None] | None = None
        self.freed: dict[str, float] = {}

    def compute_probe(self) -> None:
        """Computes the log-probs by which generators will prove these weights, while the learner has the devices."""
        if len(self._probe_ids) > 1:
            log_probs = self._ranks.log_probs(np.array(self._probe_ids, dtype=np.int32))
            self._probe = Probe(self._probe_ids, log_probs.tolist())

    def begin_swap(self) -> None:
        """Stops waking generators that come: all are asked in a swap."""
        self._stop_waking()

    def take(self, phase: Phase, *, last: bool = False) -> str:
        """Takes one step; returns why it failed, or nothing.

        Args:
            phase: of the step.
            last: the run ends, and nothing is generated any more. A generator that does not answer probably sleeps:
                where it does not, `onloading` finds no memory.

        Raises:
            FencedError: another learner has taken over.
        """
        match phase:
            case Phase.ONLOADING:
                try:
                    self._ranks.onload()
                except MemoryError as error:
                    return str(error)
                return ""
            case Phase.OFFLOADING:
                try:
                    moved = self._ranks.offload()
                except SwapError as error:
                    return str(error)
                self.freed["placement/learner_freed_bytes"] = float(moved.freed_bytes)
                return ""
            case Phase.FREEZING | Phase.RELEASING:
                answer = self._ask(phase, self._generators.sleep(_SLEEP[phase], self._machine.left_s))
                freed = sum(response.freed_bytes for response in answer.done.values())
                self.freed["placement/generators_freed_bytes"] = float(freed)
                if last and answer.silent:
                    log.warning("the devices are taken all the same: %s", answer.failures())
                # One that does not sleep has the memory.
                return answer.failures(without_silent=last)
            case _:
                if phase is Phase.WAKING:
                    # The first step of every attempt: who was late may be in time now.
                    self._late.clear()
                self._versions.wait_in_force()
                request, left_s = self._wake_request(phase), self._machine.left_s
                answer = self._ask(phase, self._generators.wake(request, left_s, without=self._late))
                if answer.failed and answer.done:
                    # It is asked again while the others generate.
                    self._late.update(answer.failed)
                    log.warning("sleeps on for now: %s", answer.failures())
                    return ""
                if phase is Phase.RESUMING:
                    self._log_proofs(answer)
                return answer.failures()

    def keep_awake(self) -> None:
        """Wakes generators that come while others generate, until the next swap begins."""
        request = self._wake_request(Phase.RESUMING, others_generate=True)
        self._waking = self._bridge.submit(self._wake_newcomers(request))

    def close(self) -> None:
        """Stops waking generators, and closes the channels to them."""
        self._stop_waking()
        self._bridge.call(self._generators.close(), _GRACE_S)

    def _log_proofs(self, answer: GroupAnswer) -> None:
        """Logs the way in which weights are proven, once, and again where it changes."""
        proofs = {
            response.verified_by or "nothing: their tensors cannot be compared" for response in answer.done.values()
        }
        if proofs and proofs != self._proofs:
            self._proofs = proofs
            log.info("generators prove the weights that they have loaded by %s", ", ".join(sorted(proofs)))

    def _wake_request(self, phase: Phase, *, others_generate: bool = False) -> generator_pb2.WakeRequest:
        policy = self._status.published
        if policy is None:
            raise SwapError("no version of the weights is in force")
        return self._generators.wake_request(_WAKE[phase], policy, self._probe, others_generate=others_generate)

    def _ask(self, phase: Phase, asking: Coroutine[Any, Any, GroupAnswer]) -> GroupAnswer:
        """Waits for the generators' answers, in turns, so that the other ranks wait too."""
        running = self._bridge.submit(self._with_reason(phase, asking))
        return self._bridge.result(
            running, self._machine.left_s + _GRACE_S, wait=partial(wait_keeping_alive, self._ranks)
        )

    async def _with_reason(self, phase: Phase, asking: Coroutine[Any, Any, GroupAnswer]) -> GroupAnswer:
        async def report() -> None:
            while True:
                names = ", ".join(sorted(self._generators.waiting_for)[:3])
                if names:
                    lasted_s = self._machine.lasted_s
                    self._status.waiting_reason = f"waits for {names} {_AWAITED[phase]} ({lasted_s:.0f} s)"
                await asyncio.sleep(1.0)

        reporting = asyncio.create_task(report())
        try:
            return await asking
        finally:
            reporting.cancel()
            self._status.waiting_reason = ""

    async def _wake_newcomers(self, request: generator_pb2.WakeRequest) -> None:
        """The mesh's absence ends the run by itself."""
        while True:
            try:
                await self._generators.keep_awake(request, self._machine.step_s)
            except FencedError:
                return
            except RollmeshError as error:
                log.warning("generators that come are not woken for now: %s", error)
                await asyncio.sleep(1.0)

    def _stop_waking(self) -> None:
        if self._waking is not None:
            waking, self._waking = self._waking, None
            waking.cancel()
