"""Milliseconds from the insertion of a trajectory to the learner at a paced rate, compared with Reverb.

    python -m benchmarks.buffer.latency --reverb-python /path/to/reverb-venv/bin/python --json latency.json

One writer, 200 trajectories/s, groups of one, claimed in batches of 64; ours without persistence, as Reverb, and with
every write fsynced. The clock starts before the payload is encoded and stops when the learner (Reverb: the reader)
holds the message. Contenders alternate, in parts, until each has the samples asked for; quantiles are of all parts
together, and each part's are in the JSON. Needs a quiet machine.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.buffer.mesh import quantile
from benchmarks.buffer.options import add_reverb_option
from benchmarks.buffer.plan import Plan
from benchmarks.buffer.reverb import Reverb
from benchmarks.buffer.throughput import TOKENS, measure
from benchmarks.common import machine, table, write_json, yardstick

QUANTILES = {"p50": 0.50, "p90": 0.90, "p99": 0.99, "p999": 0.999}
_PART_S = 10.0


def main(argv: list[str] | None = None) -> int:
    """Prints the quantiles and writes them, part by part, to --json."""
    args = _parse(argv)
    plans = [Plan(tokens=tokens, seconds=_PART_S, rate=args.rate, batch=64) for tokens in args.tokens]
    samples: dict[str, list[float]] = {}
    parts: dict[str, list[dict[str, float]]] = {}
    moods = []
    with Reverb(args.reverb_python) as reverb:
        for part in range(max(1, round(args.samples / args.rate / _PART_S + 0.5))):
            moods.append(yardstick())
            for plan in plans:
                contenders: list[tuple[str, Any]] = [(f"T{plan.tokens}/reverb", lambda plan=plan: reverb.measure(plan))]
                for level in args.durability:
                    ours = replace(plan, durability=level)
                    contenders.append((f"T{plan.tokens}/{level}", lambda plan=ours: measure(plan)))
                for name, run in contenders[:: -1 if part % 2 else 1]:
                    found = run().latencies_ms
                    samples.setdefault(name, []).extend(found)
                    parts.setdefault(name, []).append(_quantiles(found))
                    print(part, name, parts[name][-1], flush=True)
    rows = [
        [name, len(found), *(f"{value:.2f}" for value in _quantiles(found).values())] for name, found in samples.items()
    ]
    print(table(("contender", "samples", *(f"{name} ms" for name in QUANTILES)), rows))
    if args.json:
        whole = {name: {"samples": len(found), **_quantiles(found)} for name, found in samples.items()}
        write_json(args.json, {"machine": machine(), "yardstick": moods, "latency_ms": whole, "parts": parts})
    return 0


def _quantiles(samples: list[float]) -> dict[str, float]:
    ordered = sorted(samples)
    return {name: round(quantile(ordered, share), 3) for name, share in QUANTILES.items()}


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_reverb_option(parser)
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--samples", type=int, default=10_000, help="of each contender and size, at least")
    parser.add_argument("--durability", nargs="+", default=["none", "always"], help="levels of ours")
    parser.add_argument("--rate", type=float, default=200.0, help="trajectories/s")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS), help="response tokens")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
