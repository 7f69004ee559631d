"""The cost of 10 to 5,000 generators: a fleet without engines on real fronts and a real Redis.

    python -m benchmarks.fleet --json fleet.json

Each cell is added to the file once it is done. The same command continues a table that was interrupted, and prints all
of it; `--again` measures its cells again.

Each simulated generator is a client of the buffer with the product's own rollout loop: two admission streams, a write
stream, heartbeats, drafts, releases. Its responses have scripted lengths and take scripted times (`scenario.py`). Each
cell runs in this order:

1. All generators join. They sample a fixed number of trajectories/s together, however many they are.
2. A tenth is killed at once (kill -9). It is timed until all groups of theirs are in other hands.
3. Others join meanwhile. In cells with the fewest fronts a tenth then hangs (SIGSTOP), timed alike, and wakes.
4. All responses are complete at once: the most that the buffer takes.
5. The learner ends, and both ledgers are recounted.

The simulator shares the machine's cores with what it measures. So CPU time per trajectory says more than rates and
latencies. About fifteen minutes on two idle cores; `--generators 10 100 --fronts 1` for a part.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.common import HelpFormatter, table, yardstick
from benchmarks.fleet.cell import run_cell
from benchmarks.fleet.results import HEADER, ResultFile
from benchmarks.fleet.scenario import Scenario


def main(argv: Sequence[str] | None = None) -> int:
    """Measures the cells, adds each to --json, and prints the table; returns 1 where a ledger is not exact."""
    args = _parse(argv)
    # gRPC has a word for each of thousands of connections.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    base = Scenario(0, rate=args.rate, seconds=args.seconds)
    scenarios = [
        replace(base, generators=generators, fronts=fronts, frozen=args.frozen if fronts == min(args.fronts) else 0.0)
        for generators in args.generators
        for fronts in args.fronts
    ]
    scenarios += [
        replace(base, generators=generators, fronts=max(args.fronts), cluster=True) for generators in args.cluster
    ]
    results, exact = ResultFile(args.json), True
    for number, scenario in enumerate(scenarios, 1):
        print(f"cell {number} of {len(scenarios)}: {scenario.name}", flush=True)
        if results.has(scenario) and not args.again:
            print(f"{scenario.name}: has been measured", flush=True)
            continue
        mood = yardstick()
        with tempfile.TemporaryDirectory(prefix="rollmesh-fleet-") as folder:
            result = run_cell(scenario, Path(folder), profile=args.profile, progress=_progress)
        results.add(result, mood)
        exact = exact and not result.wrong
    print(table(HEADER, results.rows(scenario.name for scenario in scenarios)))
    return 0 if exact else 1


def _progress(text: str) -> None:
    print(text, flush=True)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--json", type=Path, help="file to which results are added, cell by cell")
    parser.add_argument("--again", action="store_true", help="measure cells again that the file has already")
    parser.add_argument("--generators", type=int, nargs="+", default=[10, 100, 1000, 5000], help="of the cells")
    parser.add_argument("--fronts", type=int, nargs="+", default=[1, 2, 4], help="front processes of the cells")
    parser.add_argument("--cluster", type=int, nargs="*", default=[1000], help="generators of cells on a Redis Cluster")
    parser.add_argument("--rate", type=float, default=200.0, help="trajectories/s of the paced phase")
    parser.add_argument("--seconds", type=float, default=5.0, help="measured time of each phase")
    parser.add_argument("--frozen", type=float, default=0.1, help="share of generators that hang for a while")
    parser.add_argument("--profile", type=Path, help="a folder for the fronts' profiles (cProfile)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
