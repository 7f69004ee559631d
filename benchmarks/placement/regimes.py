"""Batches per second of one mesh in each placement, on the same cores, in four regimes.

    python -m benchmarks.placement.regimes --json regimes.json

The placements alternate within each round, and one configuration serves all: the only difference is `placement`. A
regime's window begins after its warm-up, in which `auto` has its trials, or after the last of these. Their cost is the
difference of wall times of whole runs, in a column of its own. Needs a quiet machine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import HelpFormatter, Summary, machine, summarize, table, write_json, yardstick
from benchmarks.mesh_run import MeshRun, run_mesh
from benchmarks.whole_loop.async_vs_sync import SLOW_REWARD
from benchmarks.workloads import WORKLOADS, mesh_config, prepare

PLACEMENTS = ("split", "collocated", "hybrid", "auto")


@dataclass(frozen=True, slots=True)
class Regime:
    """A workload with or without a slow reward.

    Attributes:
        warmup: batches left out at least; `auto` has its trials in them.
        batches: batches measured.
    """

    name: str
    workload: str
    slow_reward: bool
    warmup: int
    batches: int


REGIMES = {
    regime.name: regime
    for regime in (
        Regime("short", "fixed-0.13m", False, 120, 160),
        Regime("long-tail", "long-tail", False, 32, 48),
        Regime("slow-rewards", "fixed-0.13m", True, 120, 160),
        Regime("compute-bound", "fixed-3.9m", False, 24, 12),
    )
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One run.

    Attributes:
        batch_s: seconds per batch of the window.
        run_s: wall time of the whole command.
        swap_share: of the learner's time, 0 without turns.
        chosen: the placement in which the run ended.
    """

    placement: str
    batch_s: float
    run_s: float
    swap_share: float
    chosen: str
    yardstick: dict[str, float]


def measure(regime: Regime, folder: Path, placement: str, staleness: int, model: Path, data: Path) -> Measured:
    """One run of a regime."""
    workload = WORKLOADS[regime.workload]
    config: dict[str, Any] = mesh_config(workload, model, data, folder, steps=regime.warmup + regime.batches)
    config["buffer"] = {"max_staleness": staleness}
    config["placement"] = placement
    if regime.slow_reward:
        config["reward"] = {"functions": [SLOW_REWARD]}
    before, began = yardstick(), time.monotonic()
    run = run_mesh(config, timeout_s=1800.0)
    lasted = time.monotonic() - began
    last = run.steps[-1]
    return Measured(
        placement,
        _batch_s(run, max(regime.warmup, int(run.summary["placement"]["step"]))),
        lasted,
        float(last.get("placement/swap_share", 0.0)),
        str(run.summary["placement"]["mode"]),
        before,
    )


def _batch_s(run: MeshRun, warmup: int) -> float:
    """Seconds per batch from the end of the warm-up on."""
    return float(run.steps[-1]["wall_s"] - run.steps[warmup - 1]["wall_s"]) / (len(run.steps) - warmup)


def compare(regime: Regime, folder: Path, rounds: int, staleness: int, placements: Sequence[str]) -> list[Measured]:
    """All placements, alternating."""
    model, data = prepare(WORKLOADS[regime.workload], folder)
    found = []
    for number in range(rounds):
        for placement in placements if number % 2 == 0 else placements[::-1]:
            print(f"{regime.name} round {number + 1}: {placement}", file=sys.stderr, flush=True)
            found.append(measure(regime, folder / f"{placement}-{number}", placement, staleness, model, data))
    return found


def rows(name: str, found: Sequence[Measured], placements: Sequence[str]) -> list[list[object]]:
    """One row per placement of a regime, next to the best of those that are fixed."""
    seconds = {p: summarize(run.batch_s for run in found if run.placement == p) for p in placements}
    best = min(summary.median for p, summary in seconds.items() if p in ("split", "collocated")) if seconds else 0.0
    return [_row(name, p, seconds[p], best, [run for run in found if run.placement == p]) for p in placements]


def _row(name: str, placement: str, seconds: Summary, best: float, runs: Sequence[Measured]) -> list[object]:
    share = summarize(run.swap_share for run in runs).median
    chosen = ", ".join(sorted({run.chosen for run in runs}))
    whole = summarize(run.run_s for run in runs)
    return [name, placement, seconds, f"{best / seconds.median:.2f}", f"{share:.1%}", f"{whole.median:.1f}", chosen]


HEADER = (
    "regime",
    "placement",
    "s/batch",
    "speed against the better of split and collocated",
    "in swaps",
    "run s",
    "in",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the comparison; prints a table and writes every run to --json."""
    args = _parser().parse_args(argv)
    lines: list[list[object]] = []
    results: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="rollmesh-placement-") as scratch:
        for name in args.regimes:
            found = compare(REGIMES[name], Path(scratch) / name, args.rounds, args.staleness, args.placements)
            results[name] = [asdict(run) for run in found]
            lines += rows(name, found, args.placements)
            print(table(HEADER, lines[-len(args.placements) :]), flush=True)
            if args.json:
                body = {"benchmark": "placement", "machine": machine(), "staleness": args.staleness, "runs": results}
                write_json(args.json, body)
    print("\n" + table(HEADER, lines))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=list(REGIMES), help="measured")
    parser.add_argument("--placements", nargs="+", choices=PLACEMENTS, default=list(PLACEMENTS), help="compared")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each placement")
    parser.add_argument("--staleness", type=int, default=4, help="buffer.max_staleness")
    parser.add_argument("--json", type=Path, help="file to write")
    return parser


if __name__ == "__main__":
    sys.exit(main())
