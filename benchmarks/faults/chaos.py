"""The mesh under faults by seed: what is lost, what is trained twice, where it stands still, how soon it continues.

    python -m benchmarks.faults.chaos --minutes 10 --seed 1 --slow --json 1.json
    python -m benchmarks.faults.chaos --minutes 10 --seed 2 --max-reuse 2 --durability everysec --eval --json 2.json
    python -m benchmarks.faults.chaos --merge 1.json 2.json
    python -m benchmarks.faults.chaos --matrix 90 --seed 1 --json matrix.json
    python -m benchmarks.faults.chaos --turns --minutes 30 --seed 1 --json turns.json

`--turns` strikes every process in every phase of the turns on shared devices. `--matrix` shares its minutes among a set
of runs in which every two values of the settings meet. Each run has a seed of its own, and the sum is written after
each. Needs nothing beyond the development environment: Redis is the one that the package brings. Cutting the links
between two ranks needs the right to trace one's own processes. The folder of a run that failed stays, with the logs of
every process. Exits with 1 where anything was lost, doubled, unbalanced or late.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from benchmarks.common import HelpFormatter, machine, write_json
from rollmesh.mesh.config.buffer import ORDERS
from tests.faults.chaos import Chaos
from tests.faults.combinations import Combination, covering
from tests.faults.redis_disk import Durability
from tests.faults.report import merged, summary
from tests.faults.schedule import schedule, turns
from tests.faults.world import Settings, prepare_data

AXES: dict[str, Sequence[Any]] = {
    "staleness": (0, 1, 4),
    "order": ORDERS,
    "max_reuse": (1, 2),
    "durability": get_args(Durability),
    "slow": (True, False),
    "evaluation": (True, False),
}


def possible(settings: Combination) -> bool:
    """A second use of a group is a version later, at least."""
    return bool(settings["max_reuse"] <= settings["staleness"] + 1)


def measure(
    seed: int, minutes: float, folder: Path, kinds: frozenset[str] | None, settings: Settings
) -> dict[str, Any]:
    """One run, as JSON has it."""
    host = machine()
    folder.mkdir(parents=True, exist_ok=True)
    chaos = Chaos(folder, prepare_data(folder / "data"), settings, lambda line: print(line, flush=True))
    if settings.turns:
        rounds = turns(seed, lease_s=settings.lease_s, step_s=settings.step_s)
    else:
        rounds = schedule(seed, lease_s=settings.lease_s, evaluation=settings.evaluation, kinds=kinds)
    outcome = chaos.run(rounds, seed=seed, seconds=minutes * 60)
    return {"machine": host, **outcome.as_json()}


def runs(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Runs what was asked for, one after the other; removes the folders of those that were sound."""
    kinds = frozenset(options.kinds) if options.kinds else None
    chosen = (
        covering(AXES, possible) if options.matrix else [{name: getattr(options, name) for name in (*AXES, "turns")}]
    )
    minutes = options.matrix / len(chosen) if options.matrix else options.minutes
    for index, settings in enumerate(chosen):
        print(f"run {index + 1} of {len(chosen)}: {settings}", flush=True)
        place = folder / f"run-{index}"
        run = measure(options.seed + index, minutes, place, kinds, Settings(**settings))
        if run["sound"] and options.folder is None:
            shutil.rmtree(place)
        else:
            print(f"kept: {place}", flush=True)
        yield run


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = _parser().parse_args(arguments)
    if options.merge:
        found = [json.loads(path.read_text(encoding="utf-8")) for path in options.merge]
    else:
        folder = options.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
        found = []
        for run in runs(options, folder):
            found.append(run)
            if options.json:
                write_json(options.json, merged(found))
    total = merged(found)
    print(summary(total))
    if options.json:
        write_json(options.json, total)
    return 0 if total["sound"] else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="of faults")
    parser.add_argument(
        "--matrix", type=float, metavar="MINUTES", help="in all, over runs in which every two settings meet"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the run, or of the first one of a matrix")
    parser.add_argument("--kinds", nargs="+", help="only these kinds of faults")
    parser.add_argument("--staleness", type=int, default=2, help="the bound, in versions")
    parser.add_argument("--order", choices=ORDERS, default="in_order", help="which ready groups train first")
    parser.add_argument("--max-reuse", type=int, default=1, help="steps that may use a group")
    parser.add_argument("--durability", choices=get_args(Durability), default="always", help="of Redis")
    parser.add_argument("--slow", action="store_true", help="one generator is slow")
    parser.add_argument("--turns", action="store_true", help="learner and generators share devices in turns")
    parser.add_argument("--eval", dest="evaluation", action="store_true", help="evaluate during the training")
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--folder", type=Path, help="work here, and keep it")
    parser.add_argument("--merge", type=Path, nargs="+", help="sum earlier runs instead of running")
    return parser


if __name__ == "__main__":
    sys.exit(main())
