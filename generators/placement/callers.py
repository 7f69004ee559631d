"""The calls that wait for a generator to fall asleep or to wake up, and the goal that is pursued for them.

Invariants: a call waits for no goal that is not pursued. Memory is given back whether or not a caller still waits. A
generator that wakes up needs one: without any for `ABANDONED_S` the goal ends, for its weights may never come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from rollmesh.generators.placement.turn_state import Goal, WakeGoal, includes, joined
from rollmesh.mesh.errors import RollmeshError, SwapError

ABANDONED_S = 30.0
"""Longer than the pause of a learner between two calls, also after a swap that was taken back."""


@dataclass(frozen=True, slots=True, eq=False)
class Caller:
    """One call.

    Attributes:
        goal: of the call.
        done: its outcome.
    """

    goal: Goal
    done: asyncio.Future[None]


class Callers:
    """The calls that wait at present; used in one event loop.

    Args:
        on_abandoned: called when the goal has ended for lack of callers.

    Attributes:
        goal: what is pursued for them; None: nothing.
        abandoned: the goal that ended for lack of callers; None once there is a later call.
    """

    def __init__(self, on_abandoned: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_abandoned = on_abandoned
        self._waiting: list[Caller] = []
        self._timer: asyncio.TimerHandle | None = None
        self.goal: Goal | None = None
        self.abandoned: WakeGoal | None = None

    @property
    def waiting(self) -> bool:
        """True while a call waits."""
        return bool(self._waiting)

    def add(self, goal: Goal) -> Caller:
        """Adds a call; those that it replaces fail."""
        self._stop_timer()
        self.abandoned = None
        self.goal = pursued = joined(self.goal, goal)
        replaced = [caller for caller in self._waiting if not includes(pursued, caller.goal)]
        self._fail(SwapError("a later call wants another state of this generator, or an earlier version"), replaced)
        caller = Caller(goal, self._loop.create_future())
        self._waiting.append(caller)
        return caller

    def remove(self, caller: Caller) -> None:
        """Removes a call that waits no longer; its goal is pursued for a while, for it may come again."""
        if caller in self._waiting:
            self._waiting.remove(caller)
        self._stop_timer()
        if not self._waiting:
            self._timer = self._loop.call_later(ABANDONED_S, self._abandon)

    def answer(self, is_reached: Callable[[Goal], bool]) -> None:
        """Answers the calls whose goals are reached."""
        for caller in [caller for caller in self._waiting if is_reached(caller.goal)]:
            self._waiting.remove(caller)
            if not caller.done.done():
                caller.done.set_result(None)

    def end(self, error: RollmeshError | None = None) -> None:
        """Ends the goal; calls that still wait fail with the error."""
        self.goal = None
        if error is not None:
            self._fail(error, self._waiting[:])

    def close(self, error: RollmeshError) -> None:
        """Ends everything."""
        self.end(error)
        self._stop_timer()

    def _fail(self, error: RollmeshError, callers: list[Caller]) -> None:
        for caller in callers:
            self._waiting.remove(caller)
            if not caller.done.done():
                caller.done.set_exception(error)

    def _abandon(self) -> None:
        self._timer = None
        if not self._waiting and isinstance(self.goal, WakeGoal):
            self.abandoned, self.goal = self.goal, None
            self._on_abandoned()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
