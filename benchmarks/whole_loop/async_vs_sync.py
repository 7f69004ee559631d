"""The gain of asynchrony: `max_staleness` 4 against 0, same cores, to the same number of trained groups.

    python -m benchmarks.whole_loop.async_vs_sync --json async_vs_sync.json

Both contenders are the real mesh with one generator. The synchronous one gets its own best thread layout. The divided
one that overlap needs and all cores for the side that works are tried in the first round. The better one is kept. Each
regime says which resource it stresses, and where overlap cannot help (a compute-bound model on a few cores) the ratio
shows it.

Overlap efficiency = max(generation alone, training alone) / wall of the asynchronous run, each alone on the core
it has in the mesh. Generation is from `benchmarks.whole_loop.generation_alone`. Training is the learner's compute time
in the synchronous run with the same layout, where the generator rests meanwhile. Needs a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import REPOSITORY, Summary, machine, summarize, table, write_json, yardstick
from benchmarks.mesh_run import MeshRun, Window, run_mesh, window
from benchmarks.workloads import WORKLOADS, Workload, mesh_config, prepare
from rollmesh.mesh.runtime.threads import available_cores, thread_environment

SLOW_REWARD = f"{REPOSITORY / 'benchmarks' / 'reward_functions.py'}:slow_letter_order"


@dataclass(frozen=True, slots=True)
class Regime:
    """A workload with or without a slow reward.

    Attributes:
        warmup: batches left out; more than the asynchronous mesh may hold ahead.
        batches: batches measured.
    """

    name: str
    workload: str
    slow_reward: bool
    warmup: int
    batches: int


@dataclass(frozen=True, slots=True)
class Contender:
    """A staleness bound with a thread layout."""

    name: str
    max_staleness: int
    learner_threads: int
    generator_threads: int


@dataclass(frozen=True, slots=True)
class Measured:
    """One run."""

    contender: str
    groups_s: float
    window: Window
    summary: dict[str, Any]
    yardstick: dict[str, float]


REGIMES = {
    regime.name: regime
    for regime in (
        Regime("short", "fixed-0.13m", False, 20, 160),
        Regime("long-tail", "long-tail", False, 10, 50),
        Regime("latency", "fixed-0.13m", True, 20, 100),
        Regime("compute-bound", "fixed-3.9m", False, 6, 8),
        Regime("long-tail-latency", "long-tail", True, 10, 50),
    )
}


def contenders(cores: int) -> list[Contender]:
    """The asynchronous mesh as it starts by default, and the synchronous one divided and undivided."""
    learner = max(1, cores // 2)
    divided = (learner, max(1, cores - learner))
    found = [Contender("async", 4, *divided), Contender("sync-divided", 0, *divided)]
    return found if cores == 1 else [*found, Contender("sync-all-cores", 0, cores, cores)]


def main(argv: list[str] | None = None) -> int:
    """Runs the comparison; prints a table and writes every run to --json."""
    args = _parse(argv)
    results, rows = {}, []
    with tempfile.TemporaryDirectory(prefix="rollmesh-async-") as scratch:
        for name in args.regimes:
            results[name] = _compare(REGIMES[name], Path(scratch) / name, args.rounds)
            rows.append(_row(name, results[name]))
            print(table(_HEADER, rows[-1:]), flush=True)
            if args.json:
                write_json(args.json, {"benchmark": "async_vs_sync", "machine": machine(), "results": results})
    print("\n" + table(_HEADER, rows))
    return 0


def _compare(regime: Regime, folder: Path, rounds: int) -> dict[str, Any]:
    workload = WORKLOADS[regime.workload]
    model, data = prepare(workload, folder)
    tried = contenders(available_cores())

    def turn(number: int, field: Sequence[Contender]) -> list[Measured]:
        found = []
        for contender in field:
            print(f"{regime.name} round {number + 1}: {contender.name}", file=sys.stderr, flush=True)
            found.append(_run(regime, workload, model, data, folder / f"{contender.name}-{number}", contender))
        return found

    runs = turn(0, tried)
    best = max((c.name for c in tried if c.max_staleness == 0), key=lambda name: _rate(runs, name).median)
    kept = [contender for contender in tried if contender.name in ("async", best)]
    for number in range(1, rounds):
        runs += turn(number, kept if number % 2 == 0 else kept[::-1])
    generation_s = workload.samples * _generation_alone(regime.workload, model, data, tried[0].generator_threads)
    training_s = summarize(
        _per_batch(run.window.train_s, run) for run in runs if run.contender == "sync-divided"
    ).median
    wall_s = summarize(_per_batch(run.window.seconds, run) for run in runs if run.contender == "async").median
    return {
        "async": _rate(runs, "async"),
        "sync": {c.name: _rate(runs, c.name) for c in tried if c.max_staleness == 0},
        "sync_best": best,
        "ratio": round(_rate(runs, "async").median / _rate(runs, best).median, 3),
        "generation_alone_s": round(generation_s, 5),
        "training_alone_s": round(training_s, 5),
        "async_wall_s": round(wall_s, 5),
        "overlap_efficiency": round(max(generation_s, training_s) / wall_s, 4),
        "learner_waited": {c.name: _waited(runs, c.name) for c in tried},
        "regime": asdict(regime),
        "workload": asdict(workload),
        "runs": [asdict(run) for run in runs],
    }


def _run(regime: Regime, workload: Workload, model: Path, data: Path, folder: Path, contender: Contender) -> Measured:
    config = mesh_config(workload, model, data, folder, steps=regime.warmup + regime.batches)
    config["buffer"] = {"max_staleness": contender.max_staleness}
    config["resources"] = {
        "learner_threads": contender.learner_threads,
        "generator_threads": contender.generator_threads,
    }
    if regime.slow_reward:
        config["reward"] = {"functions": [SLOW_REWARD]}
    before = yardstick()
    run: MeshRun = run_mesh(config)
    measured = window(run, regime.warmup)
    rate = measured.batches * workload.groups / measured.seconds
    return Measured(contender.name, rate, measured, run.summary, before)


def _generation_alone(workload: str, model: Path, data: Path, threads: int) -> float:
    """Seconds per response, from a process of its own with the generator's threads."""
    command = [
        *(sys.executable, "-m", "benchmarks.whole_loop.generation_alone", "--workload", workload),
        *("--model", str(model), "--data", str(data), "--threads", str(threads)),
    ]
    environment = {**os.environ, **thread_environment(threads)}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True, timeout=1200, check=True
    )
    return float(json.loads(done.stdout.splitlines()[-1])["seconds_per_sample"])


def _rate(runs: list[Measured], contender: str) -> Summary:
    return summarize(run.groups_s for run in runs if run.contender == contender)


def _waited(runs: list[Measured], contender: str) -> float:
    """Share of the wall time that the learner waited for groups, median of the runs."""
    shares = [run.window.wait_s / run.window.seconds for run in runs if run.contender == contender]
    return round(summarize(shares).median, 3)


def _per_batch(seconds: float, run: Measured) -> float:
    return seconds / run.window.batches


_HEADER = (
    "regime",
    "async groups/s",
    "sync groups/s (best)",
    "layout",
    "ratio",
    "overlap",
    "learner waited async/sync",
)


def _row(name: str, result: dict[str, Any]) -> tuple[object, ...]:
    best = result["sync_best"]
    waited = f"{result['learner_waited']['async']:.0%} / {result['learner_waited'][best]:.0%}"
    rates = result["async"], result["sync"][best]
    return (name, *rates, best, f"{result['ratio']:.2f}", f"{result['overlap_efficiency']:.2f}", waited)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=list(REGIMES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
