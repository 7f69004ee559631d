"""Do the algorithms learn? Each on the demonstration's additions, from the same warm start, three seeds.

    python -m benchmarks.learning.algorithms --json learning.json
    python -m benchmarks.learning.algorithms --json learning.json --only ppo vapo --seeds 0

Every run is the real mesh with the demonstration's settings (`examples/demo/demo.yaml`: 32 groups of 8, two generators,
`max_staleness` 2) and the algorithm's preset. Differences from either stand in `ALGORITHMS` below and in the result. A
run ends at a held-out reward of `--stop-at` (greedy, 125 problems that training never sees) or after `--steps` batches.
Reached means: some evaluation was at 0.8 or over; the last one, of the final version, is given too. One run at a time;
started again, the study continues.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import summarize, table
from benchmarks.learning.studies import Results, demo_config, fresh, held_out, prepare_demo, staleness
from benchmarks.mesh_run import MeshRun

GOAL = 0.8

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dapo": {},
    "gspo": {},
    "cispo": {},
    "rloo": {},
    "reinforce_plus_plus": {},
    "ppo": {},
    # Its lambda is made for long responses: at the paper's alpha of 0.05 it is 0 below 20 tokens, and these have three.
    "vapo": {"algorithm": {"advantage": {"alpha": 1.0}, "critic_warmup": 20}},
    "decoupled_ppo": {"learner": {"batch": {"minibatches": 2}}},
}
"""Name -> changes to the demonstration's configuration; those below `algorithm` are laid over the preset."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what is missing; prints a row per run and a table per algorithm. Exit status 1 where one fell short."""
    args = _parse(argv)
    results = Results.open(args.json, "learning")
    with tempfile.TemporaryDirectory(prefix="rollmesh-learning-") as scratch:
        folder = args.folder or Path(scratch)
        for seed in args.seeds:
            data = prepare_demo(folder / f"data-{seed}", seed)
            for name in args.only:
                key = f"{name}/{seed}"
                if not results.done(key):
                    place = fresh(folder / key.replace("/", "-"))
                    config = study_config(name, seed, data, place, steps=args.steps, stop_at=args.stop_at)
                    results.run(key, config, {"name": name, "seed": seed, "changes": ALGORITHMS[name]}, measure)
                print(row(key, results.records[key]), flush=True)
    print("\n" + summary(results.measured, args.only))
    short = [key for key in results.records if not results.records[key].get("reached")]
    return int(bool(short))


def study_config(
    name: str, seed: int, data: Path, folder: Path, *, steps: int, stop_at: float = GOAL
) -> dict[str, Any]:
    """The configuration of one run."""
    changes = dict(ALGORITHMS[name])
    algorithm = {"name": name, **changes.pop("algorithm", {})}
    limit = {"learner": {"steps": steps}, "eval": {"every_steps": 25, "stop_at": stop_at}}
    return demo_config(data, folder, "run", seed, limit, {"algorithm": algorithm}, changes)


def measure(run: MeshRun) -> dict[str, Any]:
    """Held-out reward before and after, and what it took."""
    looks = held_out(run)
    best = max(look["reward"] for look in looks)
    mean, oldest = staleness(run)
    return {
        "before": looks[0]["reward"],
        "after": looks[-1]["reward"],
        "best": best,
        "reached": best >= GOAL,
        "reached_at": next((look["step"] for look in looks if look["reward"] >= GOAL), None),
        "steps": run.summary["steps"],
        "seconds": run.summary["training_s"],
        "staleness_mean": round(mean, 3),
        "staleness_max": oldest,
        "groups": run.summary["groups_by_fate"],
        "held_out": looks,
    }


def row(key: str, record: Mapping[str, Any]) -> str:
    """One run on one line."""
    if "error" in record:
        return f"{key}: FAILED: {record['error']}"
    return (
        f"{key}: {record['before']:.3f} -> {record['after']:.3f} (best {record['best']:.3f}) in {record['steps']} "
        f"steps, {record['seconds']:.1f} s, staleness {record['staleness_mean']:.2f} mean, "
        f"{record['staleness_max']} max"
    )


def summary(records: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> str:
    """A row per algorithm over its seeds, Markdown."""
    shown = {"before": "before", "best": "best", "last": "after", "steps": "steps", "seconds": "seconds"}
    header = ("algorithm", "changes", "reached 0.8", *shown, "staleness mean / max")
    rows: list[tuple[object, ...]] = []
    for name in names:
        runs = [record for record in records.values() if record["name"] == name]
        if not runs:
            continue
        columns = [summarize(float(run[key]) for run in runs) for key in shown.values()]
        age = summarize(run["staleness_mean"] for run in runs).median
        changes = runs[0]["changes"]
        rows.append(
            (
                f"`{name}`",
                f"`{json.dumps(changes)}`" if changes else "none",
                f"{sum(run['reached'] for run in runs)} of {len(runs)}",
                *columns,
                f"{age:.2f} / {max(run['staleness_max'] for run in runs)}",
            )
        )
    return table(header, rows)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS), metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=1000, help="batches after which a run gives up")
    parser.add_argument("--stop-at", type=float, default=GOAL, help="held-out reward that ends a run")
    parser.add_argument("--folder", type=Path, help="keep data and run folders here; none: a temporary folder")
    parser.add_argument("--json", type=Path, help="result file; what is in it already is not run again")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
