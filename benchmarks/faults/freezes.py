"""Freezes by seed of a whole mesh from the command line: after each the step count grows again.

    python -m benchmarks.faults.freezes --freezes 50 --seed 1 --json freezes.json

Method: `rollmesh run` on the demonstration's model and data with `buffer.max_staleness=0`, one slow generator and
leases of four seconds. Every step needs every service, so one lease that nothing ends stops it for ever. Again and
again one of front, learner, generator and reward service is stopped (SIGSTOP) for 0.5 to 3 lease terms, while steps are
trained. By the seed's choice its whole process tree is, the front's with the embedded Redis. Then it is continued,
unless the launcher has killed it by then. Measured is the time from the end of the freeze to the next trained step. A
stall: the next steps do not come within 30 s each; what the mesh says of itself then is printed and kept. Exits with 1
where there was one, or where the ledger does not balance.

With `--frozen-after SECONDS` below the longest freeze the launcher kills what is stopped for longer.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.common import REPOSITORY, HelpFormatter, machine, table, write_json
from rollmesh.mesh.liveness.process_ends import survivors
from tests.faults.observe import StepWatch
from tests.faults.processes import FaultError
from tests.faults.report import quantile
from tests.faults.world import prepare_data

SERVICES = {"front": "buffer", "learner": "learner", "generator": "generator-0", "reward service": "reward"}
LEASE_S = 4.0
# In lease terms.
_SHORTEST, _LONGEST = 0.5, 3.0
# The longest time of a step after a freeze, and how many are waited for: the first may have been on its way.
ALLOWED_S = 30.0
_STEPS = 3
# Time for which a stall is watched further, to tell one that ends from one that does not.
_PATIENCE_S = 120.0
_START_S = 180.0
_END_S = 120.0


@dataclass(frozen=True, slots=True)
class Freeze:
    """A service to be stopped, and for how long.

    Attributes:
        service: of `SERVICES`.
        tree: with everything that it has started.
        starts_s: after the step that is waited for before.
        lasts_s: until it is continued.
    """

    service: str
    tree: bool
    starts_s: float
    lasts_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a freeze.

    Attributes:
        freeze: as put.
        killed: the launcher ended the process meanwhile.
        next_step_s: from the end of the freeze to the next trained step; None where none came.
        stall_s: the longest wait for one of the steps after it, where it was over the limit.
        said: what `rollmesh status` said during the stall.
    """

    freeze: Freeze
    killed: bool
    next_step_s: float | None
    stall_s: float | None = None
    said: str = ""


def freezes(seed: int, count: int, services: Sequence[str]) -> Iterator[Freeze]:
    """The schedule of a seed: each service equally often, in random order."""
    dice = random.Random(seed)
    victims: list[str] = []
    for _ in range(count):
        if not victims:
            victims = dice.sample(list(services), len(services))
        yield Freeze(
            victims.pop(),
            dice.random() < 0.5,
            dice.uniform(0.0, 2.0),
            LEASE_S * dice.uniform(_SHORTEST, _LONGEST),
        )


def document(data: Path, folder: Path, frozen_after_s: float) -> dict[str, Any]:
    """The configuration of the run."""
    return {
        "run": {"name": "run", "dir": str(folder)},
        "model": {"path": str(data / "model")},
        "data": {"train": str(data / "train.parquet")},
        "algorithm": {"name": "grpo"},
        # One sequence at a time, and 64 in a batch.
        "rollout": {"device": "cpu", "n": 8, "slots": 1, "max_prompt_tokens": 16, "max_response_tokens": 6},
        "learner": {"device": "cpu", "steps": 10**6, "batch": {"groups": 8}, "optimizer": {"lr": 1e-5}},
        "buffer": {"max_staleness": 0, "lease_s": LEASE_S, "reconnect_grace_s": 0.5},
        "checkpoint": {"every_s": 3.0},
        "logging": {"samples_per_step": 0, "console_every_steps": 50},
        "network": {"metrics": False},
        "resources": {"frozen_after_s": frozen_after_s, "max_restarts": 1000},
    }


def recovery(freeze: Freeze, killed: bool, over: float, steps: StepWatch, status: Callable[[], str]) -> Outcome:
    """Waits until the run trains again.

    Args:
        freeze: as put.
        killed: the launcher ended the process meanwhile.
        over: when the freeze ended (monotonic).
        steps: of the run.
        status: what the mesh says of itself; asked where a step does not come.
    """
    after, first = over, None
    for _ in range(_STEPS):
        try:
            seen = steps.wait_step(after, after + ALLOWED_S).seen
        except FaultError:
            said = status()
            with suppress(FaultError):
                late = steps.wait_step(after, time.monotonic() + _PATIENCE_S).seen
                return Outcome(freeze, killed, late - over if first is None else first, late - after, said)
            return Outcome(freeze, killed, first, time.monotonic() - after, said)
        first = first if first is not None else seen - over
        after = seen
    return Outcome(freeze, killed, first)


class Mesh:
    """A `rollmesh run` in a process of its own.

    Args:
        folder: for the configuration, the run and the console's output.
        config: of the run.
    """

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        path = folder / "freezes.yaml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        self.run = folder / "run"
        self.console = folder / "console.log"
        with self.console.open("wb") as console:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rollmesh.cli", "run", str(path)],
                cwd=REPOSITORY,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.steps = StepWatch(self.run / "metrics.jsonl")

    def put(self, freeze: Freeze) -> Outcome:
        """Waits until the run trains, freezes, and waits until it trains again."""
        time.sleep(freeze.starts_s)
        victim = psutil.Process(self._pid(SERVICES[freeze.service]))
        frozen = [victim, *(victim.children(recursive=True) if freeze.tree else [])]
        _signal(frozen, signal.SIGSTOP)
        time.sleep(freeze.lasts_s)
        killed = not survivors([victim.pid])
        _signal(frozen, signal.SIGCONT)
        return recovery(freeze, killed, time.monotonic(), self.steps, self._status)

    def until_it_trains(self) -> None:
        """Waits for the first steps.

        Raises:
            FaultError: they do not come.
        """
        self.steps.wait_step(now := time.monotonic(), now + _START_S)

    def end(self) -> list[str]:
        """Ends the run in order; the errors in its ledger."""
        self.steps.close()
        # Not SIGINT, which is ignored where the measurement runs in the background of a script.
        self._process.terminate()
        try:
            status = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return [f"the run did not end within {_END_S:.0f} s"]
        wrong = [] if status == 128 + signal.SIGINT else [f"the run ended with status {status}"]
        summary = json.loads((self.run / "summary.json").read_text(encoding="utf-8"))
        if not summary["ledger"]:
            wrong.append("the buffer did not say its ledger at the end")
        return wrong + [line for ledger in summary["ledger"].values() for line in ledger["discrepancies"]]

    def close(self) -> None:
        """Ends it whatever state it is in; its services end with it."""
        self.steps.close()
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _pid(self, service: str) -> int:
        """The process id of a service that is there; waits for one that is being restarted."""
        note = self.run / "services" / f"{service}.json"
        until = time.monotonic() + _START_S
        while time.monotonic() < until:
            with suppress(FileNotFoundError):
                pid = int(json.loads(note.read_text(encoding="utf-8"))["pid"])
                if survivors([pid]):
                    return pid
            time.sleep(0.05)
        raise FaultError(f"{service} is not there")

    def _status(self) -> str:
        command = [sys.executable, "-m", "rollmesh.cli", "status", str(self.run)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        except subprocess.TimeoutExpired:
            return "no answer"
        return "\n".join(line.rstrip() for line in (done.stdout + done.stderr).splitlines())


def _signal(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(number)


def measure(
    seed: int, count: int, services: Sequence[str], folder: Path, frozen_after_s: float
) -> tuple[list[Outcome], list[str]]:
    """The outcomes of a seed's freezes, and what else went wrong."""
    data = prepare_data(folder / "data")
    outcomes: list[Outcome] = []
    with _mesh(folder, document(data, folder, frozen_after_s)) as mesh:
        mesh.until_it_trains()
        for number, freeze in enumerate(freezes(seed, count, services), start=1):
            outcome = mesh.put(freeze)
            outcomes.append(outcome)
            print(f"{number:3} {_line(outcome)}", flush=True)
            if outcome.said:
                print(outcome.said, flush=True)
            if outcome.next_step_s is None:
                return outcomes, ["the run stands still"]
        return outcomes, mesh.end()


@contextmanager
def _mesh(folder: Path, config: dict[str, Any]) -> Iterator[Mesh]:
    mesh = Mesh(folder, config)
    try:
        yield mesh
    finally:
        mesh.close()


def _line(outcome: Outcome) -> str:
    freeze = outcome.freeze
    what = f"{freeze.service}{' and all below' if freeze.tree else ''} for {freeze.lasts_s:.1f} s"
    then = "no step" if outcome.next_step_s is None else f"next step after {outcome.next_step_s:.2f} s"
    stall = f", STALL of {outcome.stall_s:.0f} s" if outcome.stall_s is not None else ""
    return f"{what}{', killed' if outcome.killed else ''}: {then}{stall}"


def report(outcomes: Sequence[Outcome]) -> str:
    """Seconds to the next step by service, as a Markdown table."""
    by_service: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_service[outcome.freeze.service].append(outcome)
    rows = []
    for service, found in [*sorted(by_service.items()), ("all", list(outcomes))]:
        times = [outcome.next_step_s for outcome in found if outcome.next_step_s is not None]
        quantiles = [f"{quantile(times, share):.2f}" if times else "-" for share in (0.5, 0.99, 1.0)]
        killed, stalls = (
            sum(map(bool, column)) for column in zip(*((o.killed, o.stall_s) for o in found), strict=True)
        )
        rows.append((service, len(found), *quantiles, killed, stalls))
    return table(("frozen", "times", "p50 s", "p99 s", "max s", "killed", "stalls"), rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--freezes", type=int, default=50, help="how many, one after another")
    parser.add_argument("--seed", type=int, default=1, help="of services, beginnings and lengths")
    parser.add_argument("--services", nargs="+", choices=list(SERVICES), default=list(SERVICES), help="only these")
    parser.add_argument("--frozen-after", type=float, default=20.0, help="resources.frozen_after_s of the run")
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--folder", type=Path, help="work here, and keep it")
    options = parser.parse_args(arguments)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="freezes-"))
    folder.mkdir(parents=True, exist_ok=True)
    host = machine()
    outcomes, wrong = measure(options.seed, options.freezes, options.services, folder, options.frozen_after)
    stalls = [outcome for outcome in outcomes if outcome.stall_s is not None]
    print(report(outcomes))
    for line in wrong:
        print(f"WRONG: {line}")
    if options.json:
        result = {"machine": host, "seed": options.seed, "lease_s": LEASE_S, "frozen_after_s": options.frozen_after}
        write_json(options.json, {**result, "wrong": wrong, "outcomes": [asdict(outcome) for outcome in outcomes]})
    sound = not stalls and not wrong
    if sound and options.folder is None:
        shutil.rmtree(folder)
    else:
        print(f"kept: {folder}")
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
