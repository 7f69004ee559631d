"""The rate as the table grows, and the memory that a stored token takes.

    python -m benchmarks.buffer.table_growth --json growth.json

Groups of 4 x 256 tokens, no persistence. The table is filled with 1, 10, 100 thousand ready groups while the learner
waits (the fill rate). Then the learner takes batches and as many new groups follow, so that the table stays that full
(the rate). Memory is what Redis uses when the table is full, less what it used when it was empty. The sizes alternate.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.buffer.mesh import started
from benchmarks.buffer.plan import Plan
from benchmarks.common import machine, summarize, table, write_json, yardstick

GROUP, TOKENS = 4, 256
SIZES = (1_000, 10_000, 100_000)
_HEADER = ("groups in the table", "rate /s", "of the smallest", "fill /s", "bytes per token", "payload bytes per token")


def measure(groups: int, seconds: float) -> dict[str, Any]:
    """One fill and one measured window."""
    plan = Plan(tokens=TOKENS, group=GROUP, seconds=seconds, fill=True)
    plan = replace(plan, ahead=max(1, groups // plan.groups_per_step))
    held = plan.ahead * plan.groups_per_step
    with tempfile.TemporaryDirectory(prefix="rollmesh-buffer-") as folder, started(plan, Path(folder)) as mesh:
        empty = mesh.empty_bytes
        filled = mesh.filled()
        full = mesh.used_bytes()
        cell = mesh.measure()
    tokens = held * GROUP * TOKENS
    return {
        "groups": held,
        "items_s": cell.items_s,
        "fill_s": held * GROUP / filled["seconds"],
        "bytes_per_token": (full - empty) / tokens,
        "payload_bytes_per_token": filled["payload_bytes"] / tokens,
        "cpu_us": cell.cpu_us,
        "redis_us": cell.redis_us,
        "balanced": cell.balanced,
    }


def main(argv: list[str] | None = None) -> int:
    """Prints the table and writes every repetition to --json."""
    args = _parse(argv)
    runs: dict[int, list[dict[str, Any]]] = {}
    moods = []
    for repetition in range(args.repetitions):
        moods.append(yardstick())
        for groups in args.groups[:: -1 if repetition % 2 else 1]:
            found = measure(groups, args.seconds)
            runs.setdefault(groups, []).append(found)
            print(repetition, groups, {k: round(v, 2) for k, v in found.items() if isinstance(v, float)}, flush=True)
    smallest = summarize(run["items_s"] for run in runs[min(runs)]).median
    rows = []
    for groups, cells in sorted(runs.items()):
        rate = summarize(cell["items_s"] for cell in cells)
        rows.append(
            [
                f"{groups:,}",
                rate,
                f"{rate.median / smallest:.2f}",
                summarize(cell["fill_s"] for cell in cells),
                f"{cells[0]['bytes_per_token']:.2f}",
                f"{cells[0]['payload_bytes_per_token']:.2f}",
            ]
        )
    print(table(_HEADER, rows))
    if args.json:
        write_json(args.json, {"machine": machine(), "yardstick": moods, "runs": runs})
    return 0 if all(cell["balanced"] for cells in runs.values() for cell in cells) else 1


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="measured time of a cell")
    parser.add_argument("--groups", type=int, nargs="+", default=list(SIZES), help="ready groups in the table")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
