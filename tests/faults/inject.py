"""Puts one fault on the mesh and takes it off again; each call returns when the fault is over.

What a learner that was superseded must do is checked here, where it happens: end with the exit code of a fenced
learner, and leave `latest` to its successor.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from buffer.keys import Keys
from mesh.errors import FencedError
from tests.faults.observe import StepWatch
from tests.faults.processes import FaultError, Process
from tests.faults.proxy import Conditions
from tests.faults.schedule import LINKS, Fault
from tests.faults.world import FRONT, FRONTS, GENERATORS, LEARNER, REDIS, REWARDS, World

_CONDITIONS = {
    "cut": Conditions("cut"),
    "blackhole_short": Conditions("blackhole"),
    "blackhole_long": Conditions("blackhole"),
    "delay": Conditions(delay_s=0.15),
    "throttle": Conditions(bytes_per_s=20_000),
}
# A slow process: this share of the time it runs.
_PERIOD_S, _SHARE = 0.2, 0.2
TAKEOVER_S = 90.0
_FENCED_S = 45.0


class Injector:
    """Args: the mesh, and what it trains."""

    def __init__(self, world: World, steps: StepWatch) -> None:
        self._world = world
        self._steps = steps
        self._pause = threading.Event()

    def put(self, fault: Fault) -> float:
        """Does it, waits as long as it lasts, and undoes it.

        Returns:
            Monotonic time at which the fault was over (of a kill: at which it was dead).

        Raises:
            FaultError: a successor did not train, or a superseded learner did not behave.
        """
        self._pause.wait(fault.starts_s)
        if fault.kind in LINKS:
            return self._links(fault)
        actions: dict[str, Callable[[Fault], float]] = {
            "kill": self._kill,
            "kill_all": self._kill_all,
            "rank_stop": self._stop_rank,
            "rank_kill": self._kill_rank,
            "stop_short": self._stop,
            "stop_long": self._stop,
            "slow": self._slow,
            "zombie": self._zombie,
            "usurped": self._usurped,
        }
        return actions[fault.kind](fault)

    def close(self) -> None:
        """Ends what is still waiting."""
        self._pause.set()

    def _links(self, fault: Fault) -> float:
        assert not isinstance(fault.target, str)
        self._world.apply(*fault.target, _CONDITIONS[fault.kind])
        self._pause.wait(fault.lasts_s)
        self._world.apply(*fault.target, Conditions())
        return time.monotonic()

    def _kill(self, fault: Fault) -> float:
        assert isinstance(fault.target, str)
        if fault.target == LEARNER:
            self._world.ranks = fault.ranks
        self._world.supervisor.kill9(fault.target)
        return time.monotonic()

    def _kill_all(self, _fault: Fault) -> float:
        for name in (*GENERATORS, LEARNER, *REWARDS, *FRONTS, REDIS):
            self._world.supervisor.kill9(name)
        return time.monotonic()

    def _rank(self, fault: Fault) -> tuple[Process, psutil.Process]:
        """The learner, and the rank that the fault picks."""
        process = self._running(LEARNER)
        ranks = process.ranks()
        if len(ranks) < 2:
            raise FaultError(f"{process.name} has {len(ranks)} ranks, 2 were started:\n{process.tail()}")
        return process, ranks[fault.pick]

    def _stop_rank(self, fault: Fault) -> float:
        _, rank = self._rank(fault)
        rank.suspend()
        self._pause.wait(fault.lasts_s)
        rank.resume()
        return time.monotonic()

    def _kill_rank(self, fault: Fault) -> float:
        process, rank = self._rank(fault)
        # The one that is started in its place.
        self._world.ranks = fault.ranks
        process.wanted = True
        rank.kill()
        if not process.ended.wait(TAKEOVER_S):
            raise FaultError(f"{process.name} outlives one of its ranks:\n{process.tail()}")
        return time.monotonic()

    def _stop(self, fault: Fault) -> float:
        assert isinstance(fault.target, str)
        process = self._world.supervisor.current(fault.target)
        if process is None:
            return time.monotonic()  # overlaps with a kill of the same service
        process.signal(signal.SIGSTOP)
        self._pause.wait(fault.lasts_s)
        process.signal(signal.SIGCONT)
        return time.monotonic()

    def _slow(self, fault: Fault) -> float:
        assert isinstance(fault.target, str)
        until = time.monotonic() + fault.lasts_s
        while time.monotonic() < until and not self._pause.is_set():
            process = self._world.supervisor.current(fault.target)
            if process is None:
                break
            process.signal(signal.SIGSTOP)
            self._pause.wait(_PERIOD_S * (1 - _SHARE))
            process.signal(signal.SIGCONT)
            self._pause.wait(_PERIOD_S * _SHARE)
        return time.monotonic()

    # ------------------------------------------------------------------------------------- superseded learners

    def _zombie(self, _fault: Fault) -> float:
        """Stopped; a successor takes over when the lease has run out; continued."""
        self._running(LEARNER).signal(signal.SIGSTOP)
        return self._supersede(lambda old: old.signal(signal.SIGCONT))

    def _usurped(self, _fault: Fault) -> float:
        """Cut off, but computing; a successor takes over; reconnected."""
        name = self._running(LEARNER).name
        self._world.apply(name, FRONT, Conditions("blackhole"))
        return self._supersede(lambda old: self._world.apply(old.name, FRONT, Conditions()))

    def _supersede(self, release: Callable[[Process], None]) -> float:
        before, began = self._checkpoints(), time.monotonic()
        incarnation = self._steps.incarnation
        old, _ = self._world.supervisor.succeed(LEARNER)
        self._steps.wait_step(began, TAKEOVER_S, incarnation=incarnation + 1)
        release(old)
        over = time.monotonic()
        if not old.ended.wait(_FENCED_S):
            raise FaultError(f"{old.name} was superseded and is still running:\n{old.tail()}")
        if old.code != FencedError.exit_code:
            raise FaultError(f"{old.name} was superseded and ended with {old.code}:\n{old.tail()}")
        if f'"code": "{FencedError.code}"' not in old.log.read_text():
            raise FaultError(f"{old.name} was superseded and does not say so:\n{old.tail()}")
        latest = self._latest()
        if latest is not None:
            written_by = int(latest.name.split("-")[0].removeprefix("i"))
            if latest.name not in before and written_by <= incarnation:
                raise FaultError(f"`latest` names {latest.name}, which a superseded learner wrote")
            if not latest.is_dir():
                raise FaultError(f"`latest` names {latest.name}, which is gone")
        return over

    def _checkpoints(self) -> set[str]:
        folder = self._world.run / "checkpoints"
        return {path.name for path in folder.iterdir()} if folder.is_dir() else set()

    def _latest(self) -> Path | None:
        with self._world.redis() as client:
            value = client.hget(Keys("run").run, "latest")
        return Path(value.decode()) if value else None

    def _running(self, name: str) -> Process:
        self._world.supervisor.wait_ready(name, TAKEOVER_S)
        process = self._world.supervisor.current(name)
        if process is None or not psutil.pid_exists(process.popen.pid):
            raise FaultError(f"{name} does not run")
        return process
