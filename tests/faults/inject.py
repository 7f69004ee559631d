"""Puts one fault on the mesh and takes it off again; each call returns when the fault is over.

Nothing here ends a frozen process. A stop is undone after its time, as by a key press, a machine that wakes up, or a
garbage collector that is done.

The duties of a superseded learner are checked here, where they arise. It ends with the exit code of a fenced learner,
and leaves `latest` to its successor.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from rollmesh.buffer.store.keys import Keys
from rollmesh.learner.placement.turn_log import FILE as TURNS
from rollmesh.mesh.errors import FencedError
from rollmesh.mesh.liveness.process_ends import survivors
from tests.faults import rank_links
from tests.faults.moments import Moments
from tests.faults.observe import StepWatch
from tests.faults.processes import FaultError, Process
from tests.faults.proxy import Conditions
from tests.faults.schedule import LINKS, Fault
from tests.faults.turn_phases import TurnPhases
from tests.faults.world import FRONT, FRONTS, GENERATORS, LEARNER, REDIS, REWARDS, World

_CONDITIONS = {
    "cut": Conditions("cut"),
    "away_cut": Conditions("cut"),
    "blackhole_short": Conditions("blackhole"),
    "blackhole_long": Conditions("blackhole"),
    "delay": Conditions(delay_s=0.15),
    "throttle": Conditions(bytes_per_s=20_000),
}
# A slow process: this share of the time it runs.
_PERIOD_S, _SHARE = 0.2, 0.2
_LOOK_S = 0.05
TAKEOVER_S = _FENCED_S = 300.0
# A reward service is called within this time, and freezes.
_CALLED_S = 10.0


@dataclass(frozen=True, slots=True)
class Put:
    """A fault that was put on the mesh.

    Attributes:
        began, ended: monotonic (a kill ends with the death).
        held: groups that the learner had leased when it began.
    """

    began: float
    ended: float
    held: int


class Injector:
    """Args: the mesh, what it trains and what it holds."""

    def __init__(self, world: World, steps: StepWatch, moments: Moments) -> None:
        self._world = world
        self._steps = steps
        self._moments = moments
        self._phases = TurnPhases(world.run / TURNS, lambda: self._running(LEARNER))
        self._pause = threading.Event()
        self._actions: dict[str, Callable[[Fault], float]] = {
            "kill": self._kill,
            "kill_all": self._kill_all,
            "kill_fronts": self._kill_fronts,
            "lost_tail": self._lose_tail,
            "old_snapshot": self._lose_tail,
            "emptied": self._empty,
            "gil": self._hold_interpreter,
            "rank_stop": self._stop_rank,
            "rank_dead": self._deaden_ranks,
            "rank_kill": self._kill_rank,
            "rank_cut": self._cut_ranks,
            "stop_short": self._stop,
            "stop_long": self._stop,
            "away_stop": self._stop,
            "slow": self._slow,
            "turn_kill": self._strike_in_phase,
            "turn_stop": self._strike_in_phase,
            "zombie": self._zombie,
            "usurped": self._usurped,
            **dict.fromkeys(LINKS, self._links),
        }

    def put(self, fault: Fault) -> Put:
        """Waits for its moment, does it, waits as long as it lasts, and undoes it.

        Raises:
            FaultError: a successor did not train, or a superseded learner did not behave.
        """
        self._pause.wait(fault.starts_s)
        self._moments.wait(fault.moment)
        held, began = self._moments.held(), time.monotonic()
        return Put(began, self._actions[fault.kind](fault), held)

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
        return self._kill_several(*GENERATORS, LEARNER, *REWARDS, *FRONTS, REDIS)

    def _kill_fronts(self, _fault: Fault) -> float:
        """All at once, so that they start at the same moment."""
        return self._kill_several(*FRONTS)

    def _kill_several(self, *names: str) -> float:
        for name in names:
            self._world.supervisor.kill9(name)
        return time.monotonic()

    def _lose_tail(self, fault: Fault) -> float:
        """Loses writes from now on."""
        since = self._world.disk.snapshot()
        self._pause.wait(fault.lasts_s)
        self._world.disk.lose(since)
        return self._kill_several(REDIS)

    def _empty(self, _fault: Fault) -> float:
        """Redis and the fronts start on nothing, at the same moment."""
        self._world.disk.empty()
        return self._kill_several(*FRONTS, REDIS)

    def _hold_interpreter(self, fault: Fault) -> float:
        assert isinstance(fault.target, str)
        path = self._world.freeze_file(fault.target)
        note = path.with_suffix(".new")
        note.write_text(str(fault.lasts_s))
        note.rename(path)
        until = time.monotonic() + _CALLED_S
        while path.exists() and time.monotonic() < until:
            self._pause.wait(_LOOK_S)
        if path.exists():
            # No one called it: the other service has all the work, or this one is away.
            path.unlink(missing_ok=True)
        else:
            self._pause.wait(fault.lasts_s)
        return time.monotonic()

    def _ranks(self) -> tuple[Process, list[psutil.Process]]:
        process = self._running(LEARNER)
        ranks = process.ranks()
        if len(ranks) != 2:
            raise FaultError(f"{process.name} has {len(ranks)} ranks, 2 were started:\n{process.tail()}")
        return process, ranks

    def _stop_rank(self, fault: Fault) -> float:
        rank = self._ranks()[1][fault.pick]
        rank.suspend()
        self._pause.wait(fault.lasts_s)
        rank.resume()
        return time.monotonic()

    def _deaden_ranks(self, fault: Fault) -> float:
        """The connections between the ranks stand, and nothing passes."""
        process, ranks = self._ranks()
        with rank_links.dead(*ranks) as ends:
            self._pause.wait(fault.lasts_s)
        if not ends:
            raise FaultError(f"the ranks of {process.name} are not connected")
        return time.monotonic()

    def _kill_rank(self, fault: Fault) -> float:
        process, ranks = self._ranks()
        return self._ended_by(process, fault, ranks[fault.pick].kill)

    def _cut_ranks(self, fault: Fault) -> float:
        process, ranks = self._ranks()
        return self._ended_by(process, fault, lambda: rank_links.cut(*ranks))

    def _ended_by(self, process: Process, fault: Fault, blow: Callable[[], object]) -> float:
        """A learner does not outlive what is done to one of its ranks."""
        # The one that is started in its place.
        self._world.ranks = fault.ranks
        process.wanted = True
        blow()
        if not process.ended.wait(TAKEOVER_S):
            raise FaultError(f"{process.name} outlives {fault.name}:\n{process.tail()}")
        return time.monotonic()

    def _stop(self, fault: Fault) -> float:
        assert isinstance(fault.target, str)
        names = FRONTS if fault.target == FRONT else (fault.target,)
        # One that is away overlaps with a kill of the same service.
        stopped = [process for name in names if (process := self._world.supervisor.current(name)) is not None]
        for process in stopped:
            process.signal(signal.SIGSTOP)
        self._pause.wait(fault.lasts_s)
        for process in stopped:
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

    def _strike_in_phase(self, fault: Fault) -> float:
        """Kills or stops a service while the learner stands in a phase of its turns, and lets the learner continue."""
        assert isinstance(fault.target, str)
        learner = self._phases.stop_learner_in(fault.phase)
        if fault.target == LEARNER:
            if fault.kind == "turn_kill":
                return self._kill_several(LEARNER)
            self._pause.wait(fault.lasts_s)
            learner.signal(signal.SIGCONT)
            return time.monotonic()
        names = FRONTS if fault.target == FRONT else (fault.target,)
        if fault.kind == "turn_kill":
            ended = self._kill_several(*names)
            learner.signal(signal.SIGCONT)
            return ended
        stopped = [process for name in names if (process := self._world.supervisor.current(name)) is not None]
        for process in stopped:
            process.signal(signal.SIGSTOP)
        learner.signal(signal.SIGCONT)
        self._pause.wait(fault.lasts_s)
        for process in stopped:
            process.signal(signal.SIGCONT)
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
        self._steps.wait_step(began, began + TAKEOVER_S, incarnation=incarnation + 1)
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
        if process is None or not survivors([process.popen.pid]):
            raise FaultError(f"{name} does not run")
        return process
