"""A run of the mesh under faults: rounds from the schedule, recovery by events, books compared after each round.

A round is over when a step has been trained after the last of its faults, every service answers again and every
generator has stored something. A deadline that is missed ends the run as a failure; its folder stays, with all logs.
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

from learner.consumption import read_log
from mesh.errors import RollmeshError
from tests.faults.audit import Audit, Live, ask_ledger, audit, doubled, imbalances
from tests.faults.inject import Injector
from tests.faults.observe import StepWatch, WriteRecord
from tests.faults.processes import FaultError
from tests.faults.schedule import Fault, Round
from tests.faults.world import FRONTS, GENERATORS, LEARNER, REWARDS, START_S, Settings, World

RECOVERY_S = 120.0
_END_S = 90.0
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
    """

    kind: str
    target: str
    at_s: float
    lasted_s: float
    steps: int
    recovery_s: float
    restored_s: float
    overlapped: bool


@dataclass(slots=True)
class Outcome:
    """What a run gave.

    Attributes:
        seed, seconds: of the run.
        faults: in order of their rounds.
        rounds: how many.
        balanced: times that the ledger was recounted and balanced.
        problems: everything that must not be, one line each.
        exits: ends of processes that nobody asked for: service -> exit code -> count.
        audit: of the whole run; None where it failed before.
    """

    seed: int
    seconds: float = 0.0
    faults: list[Injected] = field(default_factory=list)
    rounds: int = 0
    balanced: int = 0
    problems: list[str] = field(default_factory=list)
    exits: dict[str, dict[str, int]] = field(default_factory=dict)
    audit: Audit | None = None

    @property
    def sound(self) -> bool:
        return not self.problems and self.audit is not None and not self.audit.problems

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
        self._injector = Injector(self._world, self._steps)

    def run(self, rounds: Iterable[Round], *, seed: int, seconds: float) -> Outcome:
        """Starts the mesh, puts rounds on it while there is time, ends it and compares the books."""
        outcome = Outcome(seed)
        began = time.monotonic()
        try:
            self._world.start()
            for _ in range(_FIRST_STEPS):
                self._steps.wait_step(time.monotonic(), START_S)
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
            self._injector.close()
            self._steps.close()
            self._world.close()
        return outcome

    def _round(self, one: Round, outcome: Outcome, began: float) -> None:
        start = time.monotonic()
        with ThreadPoolExecutor(len(one.faults)) as pool:
            ends = list(pool.map(self._injector.put, one.faults))
        steps = [self._wait_step(fault, end) for fault, end in zip(one.faults, ends, strict=True)]
        restored = self._wait_restored(max(ends)) - max(ends)
        for fault, end, step in zip(one.faults, ends, steps, strict=True):
            outcome.faults.append(
                Injected(
                    kind=fault.name,
                    target=fault.target if isinstance(fault.target, str) else ">".join(fault.target),
                    at_s=round(start + fault.starts_s - began, 2),
                    lasted_s=round(end - start - fault.starts_s, 2),
                    steps=self._steps.between(start + fault.starts_s, end),
                    recovery_s=round(step - end, 3),
                    restored_s=round(restored, 3),
                    overlapped=len(one.faults) > 1,
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

    def _wait_step(self, fault: Fault, end: float) -> float:
        try:
            return self._steps.wait_step(end, RECOVERY_S).seen
        except FaultError as error:
            raise FaultError(f"after {fault.name}: {error}") from None

    def _wait_restored(self, end: float) -> float:
        """Until every service answers and every generator has stored something since."""
        last = end
        for name in (*FRONTS, *REWARDS, LEARNER, *GENERATORS):
            last = max(last, self._world.supervisor.wait_ready(name, RECOVERY_S) if self._restarted(name, end) else end)
        for name in GENERATORS:
            process = self._world.supervisor.current(name)
            if process is None:
                raise FaultError(f"{name} has ended again after it was ready")
            last = max(last, self._writes.wait_write(process.name, end, RECOVERY_S))
        return last

    def _restarted(self, name: str, end: float) -> bool:
        """Whether a service is away, or was started during or after the round."""
        process = self._world.supervisor.current(name)
        return process is None or process.began > end - RECOVERY_S

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
        )

    def _exits(self) -> dict[str, dict[str, int]]:
        found: dict[str, Counter[str]] = {}
        for process in self._world.supervisor.processes:
            if process.ended.is_set() and not process.wanted:
                found.setdefault(process.service, Counter())[str(process.code)] += 1
        return {service: dict(codes) for service, codes in found.items()}
