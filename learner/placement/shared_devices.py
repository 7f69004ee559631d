"""The turns of a learner that shares its devices with generators: decides, swaps, and finds the way back.

`SwapMachine` says which step is due, and this module takes it: generators are asked over gRPC, ranks by orders. Swaps
happen in the training thread between two batches, while the other ranks wait for their next order.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

import numpy as np

from rollmesh.learner.distributed.rank_group import wait_in_turns
from rollmesh.learner.placement.generator_group import GeneratorGroup, GroupAnswer, Probe
from rollmesh.learner.placement.swap import TO_GENERATING, TO_TRAINING, Phase, SwapMachine
from rollmesh.learner.placement.turn_log import TurnLog
from rollmesh.learner.placement.turn_requests import TurnRequests
from rollmesh.learner.placement.turn_rules import TableView, TurnRules
from rollmesh.learner.runtime import LearnerRuntime
from rollmesh.learner.status import PlacementView
from rollmesh.mesh.errors import FencedError, RollmeshError, SwapError
from rollmesh.protos import generator_pb2

log = logging.getLogger(__name__)
# Between two looks at the table while a batch is held and the turn cannot begin yet.
_LOOK_S = 0.2
# Longest description of the table: clients repeat the call for less than this.
_LOOKING_S = 180.0
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

    @property
    def evaluation_is_open(self) -> bool:
        """Held-out prompts are to be answered by the version in force, or are being answered."""
        ...

    def wait_in_force(self) -> None:
        """Waits until the last version is in force."""
        ...


class SharedDevices:
    """The turns of one learner.

    Args:
        runtime: of rank 0.
        generators: that share the devices.
        versions: what they load.
        machine: in `training`: the learner has loaded its models.
        rules: of turns.
        requests: of operators.
        turn_log: of the run.
        mode: collocated or hybrid, for reports.
        probe_ids: tokens by which generators prove the weights that they have loaded; empty: by the bytes alone.
        look: describes the table `train`; a coroutine function of the event loop.
    """

    def __init__(
        self,
        runtime: LearnerRuntime,
        generators: GeneratorGroup,
        versions: Versions,
        machine: SwapMachine,
        rules: TurnRules,
        requests: TurnRequests,
        turn_log: TurnLog,
        mode: str,
        probe_ids: Sequence[int],
        look: Callable[[], Coroutine[Any, Any, TableView]],
    ) -> None:
        self._bridge = runtime.bridge
        self._ranks = runtime.ranks
        self._controls = runtime.controls
        self._status = runtime.status
        self._generators = generators
        self._versions = versions
        self._machine = machine
        self._rules = rules
        self._requests = requests
        self._log = turn_log
        self._mode = mode
        self._probe_ids = probe_ids
        self._probe = Probe()
        self._proofs: set[str] = set()
        # Generators that are left out of the rest of a swap.
        self._late: set[str] = set()
        self._look = look
        self._trained = 0
        self._freed: dict[str, float] = {}
        self._waking: Future[None] | None = None
        self._report()

    # ------------------------------------------------------------------------------------------------- turns

    def settle(self, version: int) -> None:
        """See `Turns.settle`."""
        if self._machine.phase is not Phase.TRAINING:
            self._requests.answer()
            return
        looking = self._bridge.submit(self._look())
        table = self._bridge.result(looking, _LOOKING_S, wait=partial(wait_in_turns, self._ranks))
        evaluating = self._versions.evaluation_is_open
        held = self._requests.held_s > 0
        if held or not self._rules.continues(version, self._trained, table, evaluating=evaluating):
            self.give()

    def take(self, version: int) -> bool:
        """See `Turns.take`."""
        if self._machine.phase is Phase.TRAINING:
            return True
        waiting = self._bridge.submit(self._until_it_may_begin(version, self._ranks.turn_s))
        bound_s = self._ranks.turn_s + _LOOKING_S
        may_begin = self._bridge.result(waiting, bound_s, wait=partial(wait_in_turns, self._ranks))
        if not may_begin:
            self._ranks.keep_alive()
            return False
        self._begin()
        return self._machine.phase is Phase.TRAINING

    def require(self, why: str) -> None:
        """See `Turns.require`."""
        while self._machine.phase is not Phase.TRAINING:
            if self._machine.pause_s > 0 and self._controls.stop_reason is not None:
                raise SwapError(
                    f"the devices could not be taken for {why} before the end", hint="see the learner's log"
                )
            if (pause_s := self._machine.pause_s) > 0:
                wait_in_turns(self._ranks, Future(), pause_s)
            log.info("takes the devices for %s", why)
            self._begin()

    def give(self) -> None:
        """See `Turns.give`."""
        if self._machine.phase is Phase.TRAINING:
            self._trained = 0
            if len(self._probe_ids) > 1:
                log_probs = self._ranks.log_probs(np.array(self._probe_ids, dtype=np.int32))
                self._probe = Probe(self._probe_ids, log_probs.tolist())
            self._machine.end_turn()
            self._swap()

    def batch_trained(self) -> None:
        """See `Turns.batch_trained`."""
        self._trained += 1

    def metrics(self) -> dict[str, float]:
        """See `Turns.metrics`: seconds of the last swap in each direction by step, the share of swaps in all time."""
        last = self._machine.last
        steps = {f"placement/{phase}_s": seconds for phase, seconds in last.items()}
        return {
            **steps,
            **self._freed,
            "placement/to_training_s": sum(last.get(phase, 0.0) for phase in TO_TRAINING),
            "placement/to_generating_s": sum(last.get(phase, 0.0) for phase in TO_GENERATING),
            "placement/swap_share": self._machine.swap_share,
            "placement/turns": float(self._machine.turns),
            "placement/taken_back": float(self._machine.taken_back),
        }

    def close(self) -> None:
        """Stops waking generators."""
        self._stop_waking()
        self._requests.close()
        self._bridge.call(self._generators.close(), _GRACE_S)

    # ------------------------------------------------------------------------------------------------- swaps

    async def _until_it_may_begin(self, version: int, most_s: float) -> bool:
        """True once a turn may begin; False where the time is over, or the training thread has a request to serve."""
        loop = asyncio.get_running_loop()
        until = loop.time() + most_s
        reason = ""
        try:
            while loop.time() < until:
                if self._controls.pending or self._requests.pending:
                    return False
                reason = self._reason_to_wait(version, await self._look())
                if not reason:
                    return True
                self._status.waiting_reason = reason
                await asyncio.sleep(_LOOK_S)
        finally:
            self._status.waiting_reason = ""
        return False

    def _reason_to_wait(self, version: int, table: TableView) -> str:
        if (held_s := self._requests.held_s) > 0:
            return f"takes no turn for {held_s:.0f} s: `rollmesh yield` has asked for that"
        if (pause_s := self._machine.pause_s) > 0:
            return f"tries to take the devices again in {pause_s:.0f} s"
        return self._rules.reason_to_wait(version, table, evaluating=self._versions.evaluation_is_open)

    def _begin(self) -> None:
        self._stop_waking()
        self._requests.given = False
        self._machine.begin_turn()
        self._swap()

    def _swap(self) -> None:
        """Takes the steps of a swap until one side has the devices.

        Raises:
            SwapError: neither can have them.
            FencedError: another learner has taken over.
        """
        before, self._status.phase = self._status.phase, "swapping"
        reason = ""
        self._late.clear()
        try:
            while self._machine.in_swap:
                phase = self._machine.phase
                self._report(reason)
                if phase is Phase.WAKING and (pause_s := self._machine.pause_s) > 0:
                    wait_in_turns(self._ranks, Future(), pause_s)
                reason = self._take_step(phase)
                if reason:
                    log.warning("%s failed: %s", phase, reason)
                    self._machine.fail(reason)
                else:
                    self._machine.advance()
        except BaseException as error:
            self._machine.abandon()
            self._report(str(error))
            raise
        finally:
            self._status.phase = before
            self._status.waiting_reason = ""
        self._report()
        if self._machine.phase is Phase.GENERATING:
            self._keep_awake()
            self._requests.given = True
            self._requests.answer()

    def _report(self, reason: str = "") -> None:
        """Reports the phase that begins, and why, where the step before has failed."""
        machine = self._machine
        self._log.write(turn=machine.turns, phase=machine.phase, reason=reason)
        self._status.placement = PlacementView(
            self._mode, machine.phase, time.monotonic(), machine.turns, machine.taken_back, machine.swap_share
        )

    def _take_step(self, phase: Phase) -> str:
        """Takes one step; returns why it failed, or nothing."""
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
                self._freed["placement/learner_freed_bytes"] = float(moved.freed_bytes)
                return ""
            case Phase.FREEZING | Phase.RELEASING:
                answer = self._ask(phase, self._generators.sleep(_SLEEP[phase], self._machine.left_s))
                freed = sum(response.freed_bytes for response in answer.done.values())
                self._freed["placement/generators_freed_bytes"] = float(freed)
                # One that does not sleep has the memory.
                return answer.failures()
            case _:
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

    def _log_proofs(self, answer: GroupAnswer) -> None:
        """Logs the way in which weights are proven, once, and again where it changes."""
        proofs = {
            response.verified_by or "nothing: their tensors cannot be compared" for response in answer.done.values()
        }
        if proofs and proofs != self._proofs:
            self._proofs = proofs
            log.info("generators prove the weights that they have loaded by %s", ", ".join(sorted(proofs)))

    def _wake_request(self, phase: Phase) -> generator_pb2.WakeRequest:
        policy = self._status.published
        if policy is None:
            raise SwapError("no version of the weights is in force")
        return self._generators.wake_request(_WAKE[phase], policy, self._probe)

    def _ask(self, phase: Phase, asking: Coroutine[Any, Any, GroupAnswer]) -> GroupAnswer:
        """Waits for the generators' answers, in turns, so that the other ranks wait too."""
        running = self._bridge.submit(self._with_reason(phase, asking))
        return self._bridge.result(running, self._machine.left_s + _GRACE_S, wait=partial(wait_in_turns, self._ranks))

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

    # ------------------------------------------------------------------------------------- generators that come

    def _keep_awake(self) -> None:
        request = self._wake_request(Phase.RESUMING)
        self._waking = self._bridge.submit(self._wake_newcomers(request))

    async def _wake_newcomers(self, request: generator_pb2.WakeRequest) -> None:
        """Wakes generators that come while others generate; the mesh's absence ends the run by itself."""
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
