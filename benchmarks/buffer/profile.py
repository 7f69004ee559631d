"""Where the time of a trajectory goes: CPU by process, Redis' time by command, the front's by function.

    python -m benchmarks.buffer.profile --tokens 256 --group 8

The first two come from a run as in `throughput`. The third comes from a second run with the front under cProfile, which
makes Python functions dearer than they are. Read it as an order, not as microseconds.
"""

from __future__ import annotations

import argparse
import io
import pstats
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks.buffer.mesh import started
from benchmarks.buffer.plan import Plan
from benchmarks.common import REPOSITORY, machine, table, write_json


def main(argv: list[str] | None = None) -> int:
    """Prints the three tables."""
    args = _parse(argv)
    plan = Plan(tokens=args.tokens, writers=args.writers, group=args.group, seconds=args.seconds)
    with tempfile.TemporaryDirectory(prefix="rollmesh-buffer-") as folder:
        with started(plan, Path(folder) / "plain") as mesh:
            cell = mesh.measure()
        profile = Path(folder) / "front.prof"
        with started(plan, Path(folder) / "profiled", profile) as mesh:
            mesh.measure()
        text = io.StringIO()
        stats = pstats.Stats(str(profile), stream=text)
        stats.sort_stats("tottime").print_stats(str(REPOSITORY), args.functions)
    print(f"{plan.name}: {cell.items_s:.0f} trajectories/s\n")
    print(table(("process", "CPU us per trajectory"), [(name, f"{us:.1f}") for name, us in cell.cpu_us.items()]))
    print()
    print(table(("Redis command", "us per trajectory"), [(name, f"{us:.2f}") for name, us in cell.redis_us.items()]))
    print(text.getvalue())
    if args.json:
        write_json(args.json, {"machine": machine(), "cell": asdict(cell), "front": text.getvalue().splitlines()})
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--seconds", type=float, default=3.0, help="measured time")
    parser.add_argument("--tokens", type=int, default=256, help="response tokens")
    parser.add_argument("--writers", type=int, default=1)
    parser.add_argument("--group", type=int, default=8, help="trajectories of a group")
    parser.add_argument("--functions", type=int, default=25, help="functions of the front that are listed")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
