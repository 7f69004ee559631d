"""One cell: a fleet joins, works at a pace, loses a tenth at once, gets others, works as fast as it can, is audited."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from benchmarks.buffer.mesh import quantile
from benchmarks.fleet import generator_process, learner_process, recovery
from benchmarks.fleet.pipes import answer_of
from benchmarks.fleet.scenario import Scenario
from benchmarks.fleet.servers import Servers, Usage
from rollmesh.mesh.config.network import SecuritySection

_ANSWER_S = 120.0
# A fleet joins at hundreds per second.
_JOIN_S = 600.0
_RECOVERY_S = 120.0
# A phase is measured once the fleet works at this share of its rate, or after as long as this.
_SETTLED = 0.8
_SETTLE_S = 30.0
_LOOK_S = 1.0
# Seconds after which responses without a duration are in full flow.
_FLOW_S = 3.0
# Streams that are opened per second, at least.
_OPENED_PER_S = 500


@dataclass(frozen=True, slots=True)
class Phase:
    """Measurements over some seconds.

    Attributes:
        seconds: measured time.
        trajectories_s, groups_s: that came to the learner, per second.
        admission_ms: from a credit to its grant: p50, p99.
        queued_ms: from a group's last member in the buffer to its lease: p50, p99.
        arrival_ms: from the end of a group's last response to the learner's hand: p50, p99.
        cpu_ms: CPU milliseconds per 1,000 trajectories, by process kind; fronts together.
        cores: CPU seconds per second, by process kind.
        load: of the machine, over one minute, at the end.
    """

    seconds: float
    trajectories_s: float
    groups_s: float
    admission_ms: tuple[float, float]
    queued_ms: tuple[float, float]
    arrival_ms: tuple[float, float]
    cpu_ms: dict[str, float]
    cores: dict[str, float]
    load: float


@dataclass(slots=True)
class Result:
    """Everything about one cell.

    Attributes:
        scenario: what ran.
        joined_s: seconds until all generators had joined.
        idle_cores: CPU seconds per second while all ask for work and there is none, by process kind.
        settled_s: from their first admissions until trajectories came at the rate.
        paced, saturated: the phases.
        recovery_s: from the kill until all groups of the victims were in other hands.
        recovered_groups: how many those were.
        late_join_s: seconds in which the late joiners had joined.
        rss_mb, files: by process kind, the largest process of it, at the end of the paced phase.
        generator_mb: resident memory of the simulator, per generator.
        wrong: what the ledgers do not account for; empty where they are exact.
    """

    scenario: Scenario
    joined_s: float = 0.0
    idle_cores: dict[str, float] = field(default_factory=dict)
    settled_s: float = 0.0
    paced: Phase | None = None
    saturated: Phase | None = None
    recovery_s: float = 0.0
    recovered_groups: int = 0
    late_join_s: float = 0.0
    rss_mb: dict[str, float] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    generator_mb: float = 0.0
    wrong: list[str] = field(default_factory=list)


class Fleet:
    """The processes of one cell around its servers.

    Args:
        scenario: of the cell.
        servers: started.
    """

    def __init__(self, scenario: Scenario, servers: Servers) -> None:
        self._scenario = scenario
        self._servers = servers
        self._context = multiprocessing.get_context("spawn")
        self._exit = ExitStack()
        self._generators: list[tuple[Connection, SpawnProcess]] = []
        self._learner: tuple[Connection, SpawnProcess]

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def _start(self, target: Any, *arguments: Any) -> tuple[Connection, SpawnProcess]:
        ours, theirs = self._context.Pipe()
        security = SecuritySection()
        process = self._context.Process(
            target=target, args=(theirs, self._scenario, self._servers.mesh, security, *arguments), daemon=True
        )
        process.start()
        theirs.close()
        self._exit.callback(_kill, process)
        return ours, process

    def join(self) -> float:
        """Starts everyone; returns the seconds until the whole fleet had joined."""
        self._learner = self._start(learner_process.run)
        answer_of(self._learner[0], "the learner", _JOIN_S)
        began = time.monotonic()
        self._generators = [self._start(generator_process.run, numbers) for numbers in self._scenario.shares()]
        for conn, _ in self._generators:
            answer_of(conn, "joining", _JOIN_S)
        return time.monotonic() - began

    def tell(self, verb: str, value: Any = None) -> list[Any]:
        """Sends a command to all processes of generators; returns their answers."""
        for conn, _ in self._generators:
            conn.send((verb, value))
        return [answer_of(conn, verb, _ANSWER_S) for conn, _ in self._generators]

    def open_streams(self, seconds: float) -> dict[str, float]:
        """Generators ask for work, of which there is none; returns the cores that this keeps busy, by process kind."""
        self.tell("begin")
        time.sleep(_FLOW_S + self._scenario.generators / _OPENED_PER_S)
        before, began = self.usage(), time.monotonic()
        time.sleep(seconds)
        return _cores(before, self.usage(), time.monotonic() - began)

    def begin(self) -> None:
        """The learner seeds prompts and trains."""
        self._learner[0].send("begin")
        answer_of(self._learner[0], "begin", _ANSWER_S)
        self.tell("seeded")

    def settle(self) -> float:
        """Waits until the fleet works at its rate; returns the seconds that took."""
        began = time.monotonic()
        self._measured()
        while time.monotonic() < began + _SETTLE_S:
            time.sleep(_LOOK_S)
            if self._measured()[1]["trajectories"] >= _SETTLED * self._scenario.rate * _LOOK_S:
                break
        return time.monotonic() - began

    def measure(self, seconds: float) -> Phase:
        """Measures for some seconds."""
        self._measured()
        before, began = self.usage(), time.monotonic()
        time.sleep(seconds)
        after, span = self.usage(), time.monotonic() - began
        of_generators, of_learner = self._measured()
        cores = _cores(before, after, span)
        count = max(1, of_learner["trajectories"])
        admission = [value * 1e3 for part in of_generators for value in part["admission_s"]]
        return Phase(
            seconds=span,
            trajectories_s=of_learner["trajectories"] / span,
            groups_s=of_learner["groups"] / span,
            admission_ms=_p50_p99(admission),
            queued_ms=_p50_p99(of_learner["queued_ms"]),
            arrival_ms=_p50_p99([value * 1e3 for value in of_learner["came_s"]]),
            cpu_ms={role: busy * span * 1e6 / count for role, busy in cores.items()},
            cores=cores,
            load=os.getloadavg()[0],
        )

    def _measured(self) -> tuple[list[Any], Any]:
        found = self.tell("measured")
        self._learner[0].send(("measured", None))
        return found, answer_of(self._learner[0], "measured", _ANSWER_S)

    def usage(self) -> dict[str, list[Usage]]:
        """Usage of servers and of generators' processes."""
        found = self._servers.usage()
        found["simulator"] = [Usage.of(process.pid) for _, process in self._generators if process.pid]
        return found

    def kill_victims(self) -> tuple[float, int]:
        """Kills the first process; returns the seconds until others had its groups, and how many those were."""
        conn, process = self._generators.pop(0)
        members = [f"generator-{number}" for number in self._scenario.shares()[0]]
        # Stopped first, so that what it holds is known.
        os.kill(process.pid or 0, signal.SIGSTOP)
        groups = recovery.held_by(self._servers.client, members)
        process.kill()
        conn.close()
        return recovery.wait_until_elsewhere(self._servers.client, members, groups, _RECOVERY_S), len(groups)

    def join_late(self) -> float:
        """Others join while the fleet works; returns the seconds that took."""
        conn = self._generators[0][0]
        first = self._scenario.generators
        conn.send(("join", range(first, first + self._scenario.joiner_count)))
        return float(answer_of(conn, "join", _JOIN_S))

    def audit(self) -> list[str]:
        """Ends the work; returns what the ledgers do not account for."""
        self._learner[0].send(("end", None))
        return list(answer_of(self._learner[0], "the ledger", _ANSWER_S))


def run_cell(
    scenario: Scenario, folder: Path, *, profile: Path | None = None, progress: Callable[[str], None] = print
) -> Result:
    """Runs one cell in an empty folder.

    Args:
        profile: a folder for the fronts' profiles, if wanted.
        progress: called with a line after each phase.
    """
    result = Result(scenario)
    with Servers(scenario, folder, profile) as servers, Fleet(scenario, servers) as fleet:
        result.joined_s = fleet.join()
        progress(f"{scenario.name}: joined in {result.joined_s:.1f} s")
        result.idle_cores = fleet.open_streams(scenario.seconds)
        progress(f"{scenario.name}: cores without work {result.idle_cores}")
        fleet.begin()
        result.settled_s = fleet.settle()
        result.paced = fleet.measure(scenario.seconds)
        progress(f"{scenario.name}: paced {result.paced}")
        usage = fleet.usage()
        result.rss_mb = {role: max(u.rss_mb for u in found) for role, found in usage.items()}
        result.files = {role: max(u.files for u in found) for role, found in usage.items()}
        result.generator_mb = sum(u.rss_mb for u in usage["simulator"]) / scenario.generators
        result.recovery_s, result.recovered_groups = fleet.kill_victims()
        progress(f"{scenario.name}: {result.recovered_groups} groups elsewhere after {result.recovery_s:.1f} s")
        result.late_join_s = fleet.join_late()
        fleet.tell("speed", 0.0)
        time.sleep(_FLOW_S)
        result.saturated = fleet.measure(scenario.seconds)
        progress(f"{scenario.name}: saturated {result.saturated}")
        result.wrong = fleet.audit()
    return result


def _cores(before: dict[str, list[Usage]], after: dict[str, list[Usage]], seconds: float) -> dict[str, float]:
    """CPU seconds per second, by process kind."""
    return {
        role: (sum(usage.cpu_s for usage in after[role]) - sum(usage.cpu_s for usage in before[role])) / seconds
        for role in after
    }


def _p50_p99(values: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return quantile(ordered, 0.5), quantile(ordered, 0.99)


def _kill(process: SpawnProcess) -> None:
    process.kill()
    process.join()
