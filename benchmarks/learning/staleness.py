"""The cost of stale data, corrected and uncorrected: the bound from 0 to 16 versions, a fixed number of steps.

    python -m benchmarks.learning.staleness --json staleness.json --figure docs/figures/staleness.svg

Every run is the real mesh on the demonstration's additions, GRPO, the same warm start per seed, `--steps` batches, no
early end. For each bound S: `truncated_is` (the default: weights `min(proximal / behaviour, 2)`), `behaviour` (the clip
anchors at the behaviour policy), and `none` (nothing is corrected, said explicitly). The learning rate is the
demonstration's, times `--lr-factor`. Where the policy hardly moves between versions, age does not matter, and where it
moves too far, nothing helps.

A bound is not an age. Here generators are made to run ahead as far as the gate lets them. The learner packs little into
a forward pass (`tokens_per_micro_batch`), so it is the slower side. The buffer stands full, and a group is trained S
versions after it was admitted. The measured age of trained tokens, after the first 2 S batches, is given next to the
bound. One run at a time; started again, the study continues with what is missing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import summarize, table
from benchmarks.learning.studies import Results, demo_config, fresh, held_out, prepare_demo, staleness
from benchmarks.mesh_run import MeshRun

BOUNDS = (0, 1, 2, 4, 8, 16)
CORRECTIONS: dict[str, dict[str, Any]] = {
    "truncated_is": {"mode": "truncated_is"},
    "behaviour": {"mode": "behaviour"},
    "none": {"mode": "none", "accept_uncorrected": True},
}
_LABELS = {"truncated_is": "truncated IS (default)", "behaviour": "behaviour anchor", "none": "uncorrected"}
_COLOURS = {"truncated_is": "#3366cc", "behaviour": "#2a9d5c", "none": "#c0392b"}
_LR = 1e-3
_TOKENS_PER_MICRO_BATCH = 256


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what is missing; prints a row per run, a table per bound and correction, draws the figure."""
    args = _parse(argv)
    results = Results.open(args.json, "staleness")
    common = {"steps": args.steps, "lr_factor": args.lr_factor}
    with tempfile.TemporaryDirectory(prefix="rollmesh-staleness-") as scratch:
        folder = args.folder or Path(scratch)
        for seed in args.seeds:
            data = prepare_demo(folder / f"data-{seed}", seed)
            for bound in args.bounds:
                for correction in args.corrections:
                    key = f"{bound}/{correction}/{seed}/{args.steps}/{args.lr_factor:g}"
                    what = {"bound": bound, "correction": correction, "seed": seed, **common}
                    if not results.done(key):
                        place = fresh(folder / key.replace("/", "-"))
                        config = study_config(bound, correction, seed, data, place, args)
                        results.run(key, config, what, lambda run, bound=bound: measure(run, bound))  # type: ignore[misc]
                    print(row(key, results.records[key]), flush=True)
    shown = {key: record for key, record in results.measured.items() if common.items() <= record.items()}
    print("\n" + summary(shown))
    if args.figure is not None and shown:
        args.figure.parent.mkdir(parents=True, exist_ok=True)
        args.figure.write_text(draw(shown), encoding="utf-8")
    return int(len(results.measured) < len(results.records))


def study_config(
    bound: int, correction: str, seed: int, data: Path, folder: Path, args: argparse.Namespace
) -> dict[str, Any]:
    """The configuration of one run."""
    changes = {
        "learner": {
            "steps": args.steps,
            "batch": {"tokens_per_micro_batch": _TOKENS_PER_MICRO_BATCH},
            "optimizer": {"lr": _LR * args.lr_factor},
        },
        "buffer": {"max_staleness": bound, "seed_ahead": bound + 4},
        "eval": {"every_steps": 50, "stop_at": None},
        "algorithm": {"name": "grpo", "correction": CORRECTIONS[correction]},
    }
    return demo_config(data, folder, "run", seed, changes)


def measure(run: MeshRun, bound: int) -> dict[str, Any]:
    """Held-out reward at the end, how old the data was, and how far the policy had moved from the one that wrote it."""
    settled = min(2 * bound, len(run.steps) // 2)
    looks = held_out(run)
    mean, oldest = staleness(run, settled)
    rest = run.steps[settled:]
    return {
        "before": looks[0]["reward"],
        "after": looks[-1]["reward"],
        "best": max(look["reward"] for look in looks),
        "seconds": run.summary["training_s"],
        "staleness_mean": round(mean, 3),
        "staleness_max": oldest,
        "ess": _mean(rest, "rollout_corr/ratio/ess"),
        "k3_kl": _mean(rest, "rollout_corr/k3_kl"),
        "held_out": looks,
    }


def _mean(steps: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [float(step[name]) for step in steps if step.get(name) is not None]
    return round(statistics.fmean(values), 6) if values else None


def row(key: str, record: Mapping[str, Any]) -> str:
    """One run on one line."""
    if "error" in record:
        return f"{key}: FAILED: {record['error']}"
    return (
        f"{key}: {record['before']:.3f} -> {record['after']:.3f} (best {record['best']:.3f}), staleness "
        f"{record['staleness_mean']:.2f} mean, {record['staleness_max']} max, ESS {record['ess']}, "
        f"k3 KL {record['k3_kl']}, {record['seconds']:.1f} s"
    )


def by_contender(records: Mapping[str, Mapping[str, Any]]) -> dict[tuple[int, str], list[Mapping[str, Any]]]:
    """Runs by (bound, correction), in the order of both lists."""
    found: dict[tuple[int, str], list[Mapping[str, Any]]] = {}
    for bound in sorted({record["bound"] for record in records.values()}):
        for correction in CORRECTIONS:
            runs = [r for r in records.values() if (r["bound"], r["correction"]) == (bound, correction)]
            if runs:
                found[bound, correction] = runs
    return found


def summary(records: Mapping[str, Mapping[str, Any]]) -> str:
    """A row per bound and correction over the seeds, Markdown."""
    header = ("S", "correction", "measured age, mean / max", "held-out at the end", "best", "ESS", "k3 KL", "runs")
    rows: list[tuple[object, ...]] = []
    for (bound, correction), runs in by_contender(records).items():
        age = summarize(run["staleness_mean"] for run in runs).median
        rows.append(
            (
                bound,
                _LABELS[correction],
                f"{age:.2f} / {max(run['staleness_max'] for run in runs)}",
                summarize(run["after"] for run in runs),
                summarize(run["best"] for run in runs),
                *(_median(runs, name) for name in ("ess", "k3_kl")),
                len(runs),
            )
        )
    return table(header, rows)


def _median(runs: Sequence[Mapping[str, Any]], name: str) -> str:
    values = [run[name] for run in runs if run[name] is not None]
    return f"{summarize(values).median:.3g}" if values else "-"


def draw(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Held-out reward at the end over the measured age: a point per run, a line through the medians, SVG."""
    import io

    import matplotlib as mpl
    from matplotlib.figure import Figure

    contenders = by_contender(records)
    # Texts stay texts; ids do not depend on the moment.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "rollmesh", "font.size": 9}):
        figure = Figure(figsize=(7.6, 3.4), layout="constrained")
        axes = figure.add_subplot()
        for correction, label in _LABELS.items():
            groups = [runs for (_, name), runs in contenders.items() if name == correction]
            if not groups:
                continue
            points = [(run["staleness_mean"], run["after"]) for runs in groups for run in runs]
            ages, rewards = zip(*points, strict=True)
            axes.scatter(ages, rewards, s=9, alpha=0.5, color=_COLOURS[correction])
            medians = [
                [statistics.median(run[name] for run in runs) for name in ("staleness_mean", "after")]
                for runs in groups
            ]
            axes.plot(*zip(*medians, strict=True), color=_COLOURS[correction], label=label)
        steps = next(iter(records.values()))["steps"]
        axes.set(xlabel="mean age of trained tokens, versions", ylabel=f"held-out reward after {steps} batches")
        axes.grid(visible=True, color="#e6e8eb", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bounds", nargs="+", type=int, default=list(BOUNDS))
    parser.add_argument("--corrections", nargs="+", choices=CORRECTIONS, default=list(CORRECTIONS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300, help="batches of every run")
    parser.add_argument("--lr-factor", type=float, default=1.0, help="times the demonstration's learning rate")
    parser.add_argument("--folder", type=Path, help="keep data and run folders here; none: a temporary folder")
    parser.add_argument("--figure", type=Path, help="SVG to write")
    parser.add_argument("--json", type=Path, help="result file; what is in it already is not run again")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
