"""The mesh under faults by seed: what is lost, what is trained twice, how soon it trains again.

    python -m benchmarks.chaos --minutes 10 --seed 1 --json chaos-1.json
    python -m benchmarks.chaos --minutes 10 --seed 2 --max-reuse 2 --json chaos-2.json
    python -m benchmarks.chaos --merge chaos-1.json chaos-2.json

Needs nothing beyond the development environment: Redis is the one that the package brings. The folder of a run that
failed stays, with the logs of every process. Exits with 1 where anything was lost, doubled, unbalanced or late.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import machine, write_json
from tests.faults.chaos import Chaos
from tests.faults.report import merged, summary
from tests.faults.schedule import schedule
from tests.faults.world import Settings, prepare_data


def measure(
    seed: int, minutes: float, folder: Path, kinds: frozenset[str] | None, settings: Settings
) -> dict[str, Any]:
    """One run, as JSON has it."""
    host = machine()
    chaos = Chaos(folder, prepare_data(folder / "data"), settings, lambda line: print(line, flush=True))
    outcome = chaos.run(schedule(seed, lease_s=settings.lease_s, kinds=kinds), seed=seed, seconds=minutes * 60)
    return {"machine": host, "max_reuse": settings.max_reuse, **outcome.as_json()}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", help="only these kinds of faults")
    parser.add_argument("--max-reuse", type=int, default=1, help="steps that may use a group")
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--folder", type=Path, help="work here, and keep it")
    parser.add_argument("--merge", type=Path, nargs="+", help="sum earlier runs instead of running")
    options = parser.parse_args(arguments)
    if options.merge:
        runs = [json.loads(path.read_text(encoding="utf-8")) for path in options.merge]
    else:
        folder = options.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
        folder.mkdir(parents=True, exist_ok=True)
        kinds = frozenset(options.kinds) if options.kinds else None
        runs = [measure(options.seed, options.minutes, folder, kinds, Settings(max_reuse=options.max_reuse))]
        if runs[0]["sound"] and options.folder is None:
            shutil.rmtree(folder)
        else:
            print(f"kept: {folder}")
    total = merged(runs)
    print(summary(total))
    if options.json:
        write_json(options.json, total if options.merge else runs[0])
    return 0 if total["sound"] else 1


if __name__ == "__main__":
    sys.exit(main())
