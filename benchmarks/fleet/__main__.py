"""The cost of 10 to 5,000 generators: a fleet without engines on real fronts and a real Redis.

    python -m benchmarks.fleet --json fleet.json

Each simulated generator is a client of the buffer with the product's own rollout loop: two admission streams, a write
stream, heartbeats, drafts, releases. Its responses have scripted lengths and take scripted times (`scenario.py`). Each
cell runs in this order:

1. All generators join. They sample a fixed number of trajectories/s together, however many they are.
2. A tenth is killed at once (kill -9). It is timed until all groups of theirs are in other hands.
3. Others join meanwhile. Then all responses are complete at once: the most that the buffer takes.
4. The learner ends, and both ledgers are recounted.

The simulator shares the machine's cores with what it measures. So CPU time per trajectory says more than rates and
latencies. About twelve minutes on two idle cores; `--generators 10 100 --fronts 1` for a part.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.common import HelpFormatter, machine, table, write_json, yardstick
from benchmarks.fleet.cell import Phase, Result, run_cell
from benchmarks.fleet.scenario import Scenario

_HEADER = (
    "generators", "fronts", "joined s", "trajectories/s: paced", "as fast as it goes", "admission ms: p50 / p99",
    "sealed to leased ms: p50 / p99", "CPU ms per 1,000: Redis", "fronts", "cores: Redis", "fronts", "simulator",
    "front MiB", "front connections", "a tenth lost: groups", "elsewhere after s", "ledger", "load",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and writes all results to --json; returns 1 where a ledger is not exact."""
    args = _parse(argv)
    # gRPC has a word for each of thousands of connections.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    base = Scenario(0, rate=args.rate, seconds=args.seconds)
    scenarios = [
        replace(base, generators=generators, fronts=fronts) for generators in args.generators for fronts in args.fronts
    ]
    scenarios += [
        replace(base, generators=generators, fronts=max(args.fronts), cluster=True) for generators in args.cluster
    ]
    results, moods = [], []
    for scenario in scenarios:
        moods.append(yardstick())
        with tempfile.TemporaryDirectory(prefix="rollmesh-fleet-") as folder:
            results.append(run_cell(scenario, Path(folder), profile=args.profile, progress=_progress))
    print(table(_HEADER, map(row, results)))
    if args.json:
        write_json(
            args.json, {"machine": machine(), "yardstick": moods, "cells": [asdict(result) for result in results]}
        )
    return 1 if any(result.wrong for result in results) else 0


def row(result: Result) -> list[str]:
    """One line of the table."""
    paced, fast, scenario = result.paced, result.saturated, result.scenario
    assert paced is not None
    assert fast is not None
    return [
        f"{scenario.generators:,}",
        f"{scenario.fronts}{', cluster of 3' if scenario.cluster else ''}",
        f"{result.joined_s:.1f}",
        f"{paced.trajectories_s:.0f}",
        f"{fast.trajectories_s:.0f}",
        _pair(paced.admission_ms),
        _pair(paced.queued_ms),
        *(f"{paced.cpu_ms[role]:.0f} / {fast.cpu_ms[role]:.0f}" for role in ("redis", "front")),
        *(f"{paced.cores[role]:.2f} / {fast.cores[role]:.2f}" for role in ("redis", "front", "simulator")),
        f"{result.rss_mb['front']:.0f}",
        f"{result.files['front']}",
        f"{result.recovered_groups}",
        f"{result.recovery_s:.1f}",
        "exact" if not result.wrong else "; ".join(result.wrong),
        f"{max(_loads(paced, fast)):.1f}",
    ]


def _loads(*phases: Phase) -> list[float]:
    return [phase.load for phase in phases]


def _pair(values: tuple[float, float]) -> str:
    return " / ".join(f"{value:.0f}" for value in values)


def _progress(text: str) -> None:
    print(text, flush=True)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--generators", type=int, nargs="+", default=[10, 100, 1000, 5000], help="of the cells")
    parser.add_argument("--fronts", type=int, nargs="+", default=[1, 2, 4], help="front processes of the cells")
    parser.add_argument("--cluster", type=int, nargs="*", default=[1000], help="generators of cells on a Redis Cluster")
    parser.add_argument("--rate", type=float, default=200.0, help="trajectories/s of the paced phase")
    parser.add_argument("--seconds", type=float, default=5.0, help="measured time of each phase")
    parser.add_argument("--profile", type=Path, help="a folder for the fronts' profiles (cProfile)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
