"""Trajectories per second through insert, sample, claim and commit, compared with Reverb's insert and sample.

    python -m benchmarks.buffer.throughput --reverb-python /path/to/reverb-venv/bin/python --json throughput.json

FIFO, each group once, nothing throttled by the bound. Writers, service, Redis and learner are processes of their own
that speak over loopback. `none` (no persistence) compares with Reverb; a run would use `everysec` or `always`.
Contenders alternate within a repetition and the order turns with every one, so that a slow spell of the machine meets
all. Ratios are of medians. The learner decodes every payload, claims in batches of 512 trajectories (128 of the
longest) and commits every fourth batch. The buffer holds six batches (twelve) at most. Needs a quiet machine. On
another, the CPU time of all processes per trajectory (last column) says more than the rates.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.buffer.arrays import raw_bytes
from benchmarks.buffer.mesh import Cell, started
from benchmarks.buffer.options import add_cell_options, add_reverb_option
from benchmarks.buffer.plan import Plan
from benchmarks.buffer.reverb import PeerCell, Reverb
from benchmarks.common import machine, summarize, table, write_json, yardstick

TOKENS = (256, 2048, 16384)
# Trajectories/s of ours over Reverb's that the buffer is held to, by (tokens, writers).
TARGETS = {(256, 1): 2.0, (256, 4): 2.0, (2048, 1): 2.0, (2048, 4): 2.0, (16384, 1): 0.8, (16384, 4): 1.2}
_HEADER = (
    "tokens", "writers", "payload bytes", "Reverb /s", "groups of 8 /s", "ratio", "groups of 1 /s", "ratio",
    "everysec (8) /s", "always (8) /s", "target", "CPU us: Reverb, 8, 1",
)  # fmt: skip


def contenders(tokens: int, writers: int, seconds: float) -> list[Plan]:
    """Ours, per cell of the table."""
    base = Plan(tokens=tokens, writers=writers, seconds=seconds)
    if tokens > 2048:
        base = replace(base, batch=128, ahead=12)
    return [
        replace(base, group=8),
        replace(base, group=1),
        replace(base, group=8, durability="everysec"),
        replace(base, group=8, durability="always"),
    ]


def measure(plan: Plan) -> Cell:
    """One cell on a fresh mesh."""
    with tempfile.TemporaryDirectory(prefix="rollmesh-buffer-") as folder, started(plan, Path(folder)) as mesh:
        return mesh.measure()


def main(argv: list[str] | None = None) -> int:
    """Runs all cells; prints the table and writes every repetition to --json."""
    args = _parse(argv)
    runs: dict[str, list[dict[str, Any]]] = {}
    moods = []
    with Reverb(args.reverb_python) as reverb:
        for repetition in range(args.repetitions):
            moods.append(yardstick())
            for tokens in args.tokens:
                for writers in args.writers:
                    plans: list[Plan | None] = [None, *contenders(tokens, writers, args.seconds)]
                    turn = repetition % len(plans)
                    for plan in plans[turn:] + plans[:turn]:
                        peer = Plan(tokens=tokens, writers=writers, seconds=args.seconds)
                        name = plan.name if plan else f"T{tokens}/w{writers}/reverb"
                        found: Cell | PeerCell = measure(plan) if plan else reverb.measure(peer)
                        runs.setdefault(name, []).append(asdict(found))
                        cpu = sum(found.cpu_us.values())
                        print(f"{repetition} {name} {found.items_s:.0f}/s, {cpu:.0f} us of CPU each", flush=True)
    print(table(_HEADER, [_row(runs, tokens, writers) for tokens in args.tokens for writers in args.writers]))
    if args.json:
        rates = {name: summarize(cell["items_s"] for cell in cells) for name, cells in runs.items()}
        write_json(args.json, {"machine": machine(), "yardstick": moods, "items_s": rates, "runs": runs})
    return 0 if all(cell.get("balanced", True) for cells in runs.values() for cell in cells) else 1


def _row(runs: dict[str, list[dict[str, Any]]], tokens: int, writers: int) -> list[object]:
    rates = {name: summarize(cell["items_s"] for cell in cells) for name, cells in runs.items()}
    eight, one, everysec, always = (plan.name for plan in contenders(tokens, writers, 0.0))
    reverb = rates[f"T{tokens}/w{writers}/reverb"]
    payload = runs[eight][0]["payload_bytes"]
    return [
        tokens,
        writers,
        f"{payload:,} ({raw_bytes(tokens):,})",
        reverb,
        rates[eight],
        f"{rates[eight].median / reverb.median:.2f}",
        rates[one],
        f"{rates[one].median / reverb.median:.2f}",
        rates[everysec],
        rates[always],
        f"{TARGETS.get((tokens, writers), 1.0):.1f}",
        ", ".join(f"{_cpu_us(runs[name]):.0f}" for name in (f"T{tokens}/w{writers}/reverb", eight, one)),
    ]


def _cpu_us(cells: list[dict[str, Any]]) -> float:
    """Median CPU microseconds per trajectory of all processes together."""
    return summarize(sum(cell["cpu_us"].values()) for cell in cells).median


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_reverb_option(parser)
    add_cell_options(parser, repetitions=5, tokens=TOKENS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
