"""The turns of a learner that shares its devices with generators: decides, swaps, and finds the way back.

`TurnRules` say whether a turn begins or ends, `SwapMachine` which step of a swap is due, and `SwapSteps` take it. Swaps
happen in the training thread between two batches, while the other ranks wait for their next order.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any

from rollmesh.learner.distributed.rank_group import wait_keeping_alive
from rollmesh.learner.placement.swap import TO_GENERATING, TO_TRAINING, Phase, SwapMachine
from rollmesh.learner.placement.swap_steps import SwapSteps
from rollmesh.learner.placement.turn_log import TurnLog
from rollmesh.learner.placement.turn_requests import TurnRequests
from rollmesh.learner.placement.turn_rules import TableView, TurnRules
from rollmesh.learner.runtime import LearnerRuntime
from rollmesh.learner.status import PlacementView
from rollmesh.mesh.errors import SwapError

log = logging.getLogger(__name__)
# Between two looks at the table while a batch is held and the turn cannot begin yet.
_LOOK_S = 0.2
# Longest description of the table: clients repeat the call for less than this.
_LOOKING_S = 180.0


class SharedDevices:
    """The turns of one learner.

    Args:
        runtime: of rank 0.
        steps: of swaps.
        machine: in `training`: the learner has loaded its models.
        rules: of turns.
        requests: of operators.
        turn_log: of the run.
        mode: collocated or hybrid, for reports.
        look: describes the table `train`; a coroutine function of the event loop.
    """

    def __init__(
        self,
        runtime: LearnerRuntime,
        steps: SwapSteps,
        machine: SwapMachine,
        rules: TurnRules,
        requests: TurnRequests,
        turn_log: TurnLog,
        mode: str,
        look: Callable[[], Coroutine[Any, Any, TableView]],
    ) -> None:
        self._bridge = runtime.bridge
        self._ranks = runtime.ranks
        self._controls = runtime.controls
        self._status = runtime.status
        self._steps = steps
        self._machine = machine
        self._rules = rules
        self._requests = requests
        self._log = turn_log
        self._mode = mode
        self._look = look
        self._trained = 0
        self._report()

    # ------------------------------------------------------------------------------------------------- turns

    def settle(self, version: int) -> None:
        """See `Turns.settle`."""
        if self._machine.phase is not Phase.TRAINING:
            self._requests.answer()
            return
        looking = self._bridge.submit(self._look())
        table = self._bridge.result(looking, _LOOKING_S, wait=partial(wait_keeping_alive, self._ranks))
        if self._requests.held_s > 0 or not self._rules.continues(version, self._trained, table):
            self.give()

    def take(self, version: int) -> bool:
        """See `Turns.take`."""
        if self._machine.phase is Phase.TRAINING:
            return True
        waiting = self._bridge.submit(self._until_it_may_begin(version, self._ranks.keep_alive_s))
        bound_s = self._ranks.keep_alive_s + _LOOKING_S
        may_begin = self._bridge.result(waiting, bound_s, wait=partial(wait_keeping_alive, self._ranks))
        # A request may have come since.
        if not (may_begin and self._requests.begin_turn()):
            self._ranks.keep_alive()
            return False
        self._take_devices()
        return self._machine.phase is Phase.TRAINING

    def require(self, why: str, *, last: bool = False) -> None:
        """See `Turns.require`."""
        while self._machine.phase is not Phase.TRAINING:
            if self._machine.pause_s > 0 and self._controls.stop_reason is not None:
                raise SwapError(
                    f"the devices could not be taken for {why} before the end", hint="see the learner's log"
                )
            if (pause_s := self._machine.pause_s) > 0:
                wait_keeping_alive(self._ranks, Future(), pause_s)
            log.info("takes the devices for %s", why)
            self._requests.begin_turn(despite_hold=True)
            self._take_devices(last=last)

    def give(self) -> None:
        """See `Turns.give`."""
        if self._machine.phase is Phase.TRAINING:
            self._trained = 0
            self._steps.compute_probe()
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
            **self._steps.freed,
            "placement/to_training_s": sum(last.get(phase, 0.0) for phase in TO_TRAINING),
            "placement/to_generating_s": sum(last.get(phase, 0.0) for phase in TO_GENERATING),
            "placement/swap_share": self._machine.swap_share,
            "placement/turns": float(self._machine.turns),
            "placement/taken_back": float(self._machine.taken_back),
        }

    def close(self) -> None:
        """See `Turns.close`."""
        self._requests.close()
        self._steps.close()

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
        return self._rules.reason_to_wait(version, table)

    def _take_devices(self, *, last: bool = False) -> None:
        self._machine.begin_turn()
        self._swap(last=last)

    def _swap(self, *, last: bool = False) -> None:
        """Takes the steps of a swap until one side has the devices.

        Args:
            last: see `SwapSteps.take`.

        Raises:
            SwapError: neither can have them.
            FencedError: another learner has taken over.
        """
        before, self._status.phase = self._status.phase, "swapping"
        reason = ""
        self._steps.begin_swap()
        try:
            while self._machine.in_swap:
                phase = self._machine.phase
                self._report(reason)
                if phase is Phase.WAKING and (pause_s := self._machine.pause_s) > 0:
                    wait_keeping_alive(self._ranks, Future(), pause_s)
                reason = self._steps.take(phase, last=last)
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
            self._steps.keep_awake()
            self._requests.given = True
            self._requests.answer()

    def _report(self, reason: str = "") -> None:
        """Reports the phase that begins, and why, where the step before has failed."""
        machine = self._machine
        self._log.write(turn=machine.turns, phase=machine.phase, reason=reason)
        self._status.placement = PlacementView(
            self._mode, machine.phase, time.monotonic(), machine.turns, machine.taken_back
        )
