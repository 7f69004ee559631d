"""A run of the mesh under faults: rounds from the schedule, recovery by events, books compared after each round.

A round is over when the mesh continues (`tests.faults.stalls`). Steps have been trained after the last of its faults,
every service answers again and every generator has stored something. A mesh that stands still for too long fails the
run, and the run continues if anything helps. The folder of a run that failed stays, with all logs.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rollmesh.learner.recovery.consumption_log import read_log
from rollmesh.mesh.errors import ConfigError, DataError, FencedError, RollmeshError, StalledError, StarvedError
from tests.faults.audit import Audit, Live, ask_ledger, audit, doubled, imbalances
from tests.faults.inject import Injector
from tests.faults.moments import Moments
from tests.faults.observe import StepWatch, WriteRecord
from tests.faults.processes import FaultError
from tests.faults.schedule import Round
from tests.faults.stalls import Progress, Stall
from tests.faults.world import GENERATORS, LEARNER, START_S, Settings, World

_END_S = 300.0
# A launcher does not start again what ends with one of these.
_FOR_GOOD = frozenset(
    str(error.exit_code) for error in (ConfigError, DataError, FencedError, StalledError, StarvedError)
)
# A mesh is under way once it has trained so much.
_FIRST_STEPS = 3


@dataclass(slots=True)
class Injected:
    """One fault that was put on the mesh.

    Attributes:
        kind: kind and kind of target.
        target: what exactly.
        at_s: seconds since the run began.
        lasted_s: from its beginning to its end.
        steps: trained meanwhile; none where the fault stands in the way of training.
        recovery_s: from its end to the next trained step.
        restored_s: from the end of its round until every service answered and every generator had stored something.
        overlapped: another fault was on the mesh at the same time.
        held: groups that the learner had leased and not claimed when it began.
    """

    kind: str
    target: str
    at_s: float
    lasted_s: float
    steps: int
    recovery_s: float
    restored_s: float
    overlapped: bool
    held: int


@dataclass(slots=True)
class Outcome:
    """The result of a run.

    Attributes:
        seed, seconds, settings: of the run.
        faults: in order of their rounds.
        stalls: times that the mesh stood still for too long.
        losses: times that Redis lost the end of what it had acknowledged.
        evaluations: rounds of evaluation that were finished.
        rounds: how many.
        balanced: times that the ledger was recounted and balanced.
        problems: everything that must not be, one line each.
        exits: ends of processes without a request: service -> exit code -> count.
        audit: of the whole run; None where it failed before.
    """

    seed: int
    settings: dict[str, Any]
    seconds: float = 0.0
    faults: list[Injected] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)
    losses: int = 0
    evaluations: int = 0
    rounds: int = 0
    balanced: int = 0
    problems: list[str] = field(default_factory=list)
    exits: dict[str, dict[str, int]] = field(default_factory=dict)
    audit: Audit | None = None

    @property
    def sound(self) -> bool:
        return not self.problems and not self.stalls and self.audit is not None and not self.audit.problems

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"sound": self.sound}


class Chaos:
    """Runs a mesh under faults.

    Args:
        folder: keeps everything.
        data: of the demonstration.
        settings: of the mesh.
        tell: takes progress lines.
    """

    def __init__(self, folder: Path, data: Path, settings: Settings, tell: Callable[[str], None]) -> None:
        self._world = World(folder, data, settings)
        self._settings = settings
        self._tell = tell
        self._steps = StepWatch(self._world.run / "metrics.jsonl")
        self._writes = WriteRecord(folder / "logs")
        moments = Moments(self._world.redis, settings.groups)
        self._injector = Injector(self._world, self._steps, moments)
        self._progress = Progress(self._world, self._steps, self._writes, moments, tell)

    def run(self, rounds: Iterable[Round], *, seed: int, seconds: float) -> Outcome:
        """Starts the mesh, puts rounds on it while there is time, ends it and compares the records."""
        outcome = Outcome(seed, self._settings.as_json())
        began = time.monotonic()
        try:
            self._world.start()
            for _ in range(_FIRST_STEPS):
                self._steps.wait_step(now := time.monotonic(), now + START_S)
            for one in rounds:
                if time.monotonic() - began >= seconds:
                    break
                self._round(one, outcome, began)
                threading.Event().wait(one.rest_s)
            outcome.audit = self._finish(outcome)
        except (FaultError, RollmeshError) as error:
            outcome.problems.append(str(error))
            self._tell(f"FAILED: {error}")
        finally:
            outcome.seconds = time.monotonic() - began
            outcome.exits = self._exits()
            outcome.problems += _for_good(outcome.exits)
            outcome.stalls = self._progress.stalls
            outcome.losses = len(self._world.disk.losses)
            outcome.evaluations = self._steps.evaluations
            self._injector.close()
            self._steps.close()
            self._world.close()
        return outcome

    def _round(self, one: Round, outcome: Outcome, began: float) -> None:
        with ThreadPoolExecutor(len(one.faults)) as pool:
            puts = list(pool.map(self._injector.put, one.faults))
        end = max(put.ended for put in puts)
        restored = self._progress.restored([fault.name for fault in one.faults], end) - end
        for fault, put in zip(one.faults, puts, strict=True):
            outcome.faults.append(
                Injected(
                    kind=fault.name,
                    target=fault.target if isinstance(fault.target, str) else ">".join(fault.target),
                    at_s=round(put.began - began, 2),
                    lasted_s=round(put.ended - put.began, 2),
                    steps=self._steps.between(put.began, put.ended),
                    recovery_s=round(self._steps.wait_step(put.ended, end).seen - put.ended, 3),
                    restored_s=round(restored, 3),
                    overlapped=len(one.faults) > 1,
                    held=put.held,
                )
            )
        outcome.rounds += 1
        found = self._check()
        outcome.balanced += not found
        outcome.problems += found
        done = outcome.faults[-len(one.faults) :]
        self._tell(
            f"{time.monotonic() - began:6.0f} s  {len(outcome.faults):4d} faults  "
            + " + ".join(f"{fault.kind} ({fault.target})" for fault in done)
            + f": next step after {max(fault.recovery_s for fault in done):.2f} s, all well after {restored:.1f} s"
            + "".join(f"  PROBLEM: {line}" for line in found)
        )

    def _check(self) -> list[str]:
        """The cheap part of the audit, while the mesh runs."""
        found = imbalances(self._world.fronts[0])
        log = self._world.run / "consumption.jsonl"
        if twice := doubled(read_log(log)):
            found.append(f"trained twice: {twice[:5]}")
        return found

    def _finish(self, outcome: Outcome) -> Audit:
        """Ends the learner and the generators in order, then compares all books."""
        learner = self._world.supervisor.retire(LEARNER, _END_S)
        if learner is not None and learner.code != 0:
            outcome.problems.append(f"the learner ended with {learner.code} when it was asked to:\n{learner.tail()}")
        for name in GENERATORS:
            self._world.supervisor.retire(name, _END_S)
        outcome.problems += imbalances(self._world.fronts[0])
        answer = ask_ledger(self._world.fronts[0])
        counters = {
            field.name: getattr(answer.counters, field.name)
            for field in answer.counters.DESCRIPTOR.fields
            if field.name != "reasons"
        }
        self._writes.read()
        with self._world.redis() as client:
            live = Live.read(client)
        return audit(
            consumption=self._world.run / "consumption.jsonl",
            counters=counters,
            live=live,
            stored=self._writes.stored,
            steps=self._steps.steps,
            bound=self._settings.staleness,
            max_reuse=self._settings.max_reuse,
            losses=self._world.disk.losses,
        )

    def _exits(self) -> dict[str, dict[str, int]]:
        found: dict[str, Counter[str]] = {}
        for process in self._world.supervisor.processes:
            if process.ended.is_set() and not process.wanted:
                found.setdefault(process.service, Counter())[str(process.code)] += 1
        return {service: dict(codes) for service, codes in found.items()}


def _for_good(exits: dict[str, dict[str, int]]) -> list[str]:
    """Ends that the launcher takes for the run's own."""
    return [
        f"{service} ended with {code}, after which no launcher starts it again"
        for service, codes in exits.items()
        for code in sorted(_FOR_GOOD & codes.keys())
    ]
