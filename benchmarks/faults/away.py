"""Seconds from the end of an absence to the next batch: which process was away, for how long, how much of a batch was
held.

    python -m benchmarks.faults.away --json away.json
    python -m benchmarks.faults.away --cover

The full product of five orders, three staleness bounds, reuse, one or two fronts, and seven faults. The learner, a
front or the generators are stopped, or the learner's or the generator's link is cut or dark. This lasts for three
lengths in lease terms, while the learner holds one, half, or all but one of the next batch. `--cover`: the cases of the
suite, which hold every pair. Real fronts, a real Redis, the learner's own loop and claimer; leases of 1.2 s. Exits with
1 where a run stood still for 30 s, or its ledger does not balance.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.buffer.mesh import quantile
from benchmarks.common import machine, table, write_json, yardstick
from tests.faults.away.cases import (
    FAULTS,
    TERMS,
    Round,
    Rules,
    all_rules,
    rounds_of_cover,
    rounds_of_product,
    rules_of_cover,
)
from tests.faults.away.run import BOUND_S, LEASE_S
from tests.faults.away.world import Outcome, World

# Runs that share four processes on two cores without being late by themselves.
_RUNS_AT_ONCE = 15


async def measure(runs: Sequence[Rules], rounds: Sequence[Round], bound_s: float, folder: Path) -> list[Outcome]:
    """All rounds on one world."""
    world = World(folder)
    found: list[Outcome] = []
    try:
        await world.start()
        await world.add(runs)
        for number, cases in enumerate(rounds, 1):
            outcomes = await world.put(cases, bound_s)
            found += outcomes
            stalls = [str(outcome.case) for outcome in outcomes if outcome.stall]
            latest = max(outcome.seconds for outcome in outcomes)
            print(
                f"{number}/{len(rounds)}: {len(outcomes)} cases, at most {latest:.2f} s", *stalls, sep="\n  stalled: "
            )
        await world.audit()
    finally:
        await world.close()
    return found


def rows(found: Sequence[Outcome]) -> list[list[object]]:
    """Quantiles by fault and length."""
    lines: list[list[object]] = []
    for fault in FAULTS:
        for terms in TERMS:
            cases = [one for one in found if one.case.fault == fault and one.case.terms == terms]
            seconds = sorted(one.seconds for one in cases if not one.stall)
            quantiles = [f"{quantile(seconds, share):.2f}" if seconds else "-" for share in (0.5, 0.99)]
            lines.append([fault, terms, len(cases), *quantiles, len(cases) - len(seconds)])
    return lines


def as_json(outcome: Outcome) -> dict[str, Any]:
    return {**asdict(outcome.case), "seconds": round(outcome.seconds, 3), "stall": outcome.stall}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cover", action="store_true", help="the cases of the suite only")
    parser.add_argument("--bound", type=float, default=BOUND_S, help="seconds after which a run counts as stalled")
    parser.add_argument("--json", type=Path, help="file to write")
    options = parser.parse_args(arguments)
    host, before = machine(), yardstick()
    if options.cover:
        plans = [(rules_of_cover(), list(rounds_of_cover()))]
    else:
        every = all_rules()
        chunks = [every[start : start + _RUNS_AT_ONCE] for start in range(0, len(every), _RUNS_AT_ONCE)]
        plans = [(runs, list(rounds_of_product(runs))) for runs in chunks]
    found: list[Outcome] = []
    for runs, rounds in plans:
        with tempfile.TemporaryDirectory(prefix="away-") as folder:
            found += asyncio.run(measure(runs, rounds, options.bound, Path(folder)))
    print(table(["fault", "lease terms", "cases", "p50 s", "p99 s", "stalled"], rows(found)))
    if options.json:
        document = {"machine": host, "yardstick": [before, yardstick()], "lease_s": LEASE_S}
        write_json(options.json, {**document, "cases": [as_json(one) for one in found]})
    return 1 if any(one.stall for one in found) else 0


if __name__ == "__main__":
    sys.exit(main())
