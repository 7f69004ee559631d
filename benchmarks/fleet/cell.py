"""One cell: a fleet joins, works at a pace, loses a tenth at once, gets others, works as fast as it can, is audited.

A tenth may hang in addition, until its groups are in other hands; then it wakes, and works with the others.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from benchmarks.buffer.mesh import quantile
from benchmarks.fleet import generator_process, learner_process, recovery
from benchmarks.fleet.pipes import answer_of
from benchmarks.fleet.results import Phase, Recovery, Result
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

    def kill_victims(self) -> Recovery:
        """Kills the first process (kill -9); waits until others have its groups."""
        conn, process = self._generators.pop(0)
        recovered = self._lose(process, self._scenario.shares()[0], process.kill)
        conn.close()
        return recovered

    def freeze(self) -> Recovery:
        """Stops the first process that is left (SIGSTOP) until others have its groups; then it works again."""
        process = self._generators[0][1]
        recovered = self._lose(process, self._scenario.shares()[1], lambda: None)
        os.kill(process.pid or 0, signal.SIGCONT)
        return recovered

    def _lose(self, process: SpawnProcess, numbers: range, end: Callable[[], None]) -> Recovery:
        members = [f"generator-{number}" for number in numbers]
        # Stopped first, so that what it holds is known.
        os.kill(process.pid or 0, signal.SIGSTOP)
        groups = recovery.held_by(self._servers.client, members)
        end()
        seconds = recovery.wait_until_elsewhere(self._servers.client, members, groups, _RECOVERY_S)
        return Recovery(len(groups), seconds)

    def join_late(self) -> float:
        """Others join while the fleet works; returns the seconds that took."""
        conn = self._generators[-1][0]
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
    began, result = time.monotonic(), Result(scenario)
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
        result.killed = fleet.kill_victims()
        progress(f"{scenario.name}: killed {result.killed}")
        result.late_join_s = fleet.join_late()
        if scenario.frozen_count:
            result.frozen = fleet.freeze()
            progress(f"{scenario.name}: frozen {result.frozen}")
        fleet.tell("speed", 0.0)
        time.sleep(_FLOW_S)
        result.saturated = fleet.measure(scenario.seconds)
        result.total_mb = sum(used.rss_mb for found in fleet.usage().values() for used in found)
        progress(f"{scenario.name}: saturated {result.saturated}")
        result.wrong = fleet.audit()
        result.took_s = time.monotonic() - began
        progress(f"{scenario.name}: ledger {'; '.join(result.wrong) or 'exact'}, {result.took_s:.0f} s")
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
