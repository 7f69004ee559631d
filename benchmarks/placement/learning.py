"""Held-out rewards of the demonstration, by trained samples: the same run in several placements and with each engine.

    python -m benchmarks.placement.learning --engines hf vllm --layouts fsdp2 megatron --json learning.json

The data and model of a seed serve all its runs, and the configurations differ in `placement` alone. Engines in other
environments need their interpreters (`--vllm-python`, `--sglang-python`). On a CPU these engines release no memory, and
their processes would take half a minute to start in every turn. So they keep their memory here
(`placement.release: memory`); `benchmarks.placement.memory` shows the other way.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.common import REPOSITORY, HelpFormatter, machine, table, write_json
from benchmarks.mesh_run import run_mesh
from examples.demo.prepare import main as prepare

LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp2": {"engine": "fsdp2", "ranks": 2},
    "megatron": {"engine": "megatron", "ranks": 2, "parallel": {"tp": 2}},
}
_EVERY = 50


def config_of(data: Path, folder: Path, args: argparse.Namespace, engine: str, layout: str, placement: str) -> Any:
    """The demonstration's configuration for one run."""
    import yaml

    config = yaml.safe_load((REPOSITORY / "examples" / "demo" / "demo.yaml").read_text(encoding="utf-8"))
    config["run"] = {"name": folder.name, "dir": str(folder.parent), "seed": args.seed}
    config["model"] = {"path": str(data / "model")}
    config["data"] = {"train": str(data / "train.parquet"), "eval": str(data / "eval.parquet")}
    config["learner"] |= {"steps": args.steps, **LAYOUTS[layout]}
    config["eval"] = {"every_steps": _EVERY}
    config["placement"] = {"mode": placement} | ({} if engine == "hf" else {"release": "memory"})
    pythons = {"vllm": args.vllm_python, "sglang": args.sglang_python}
    if engine == "vllm":
        config["rollout"] |= {"engine": engine, "python": str(pythons[engine]), "replicas": 1}
    elif engine == "sglang":
        config["rollout"] |= {"engine": engine, "replicas": 1, "sglang": {"python": str(pythons[engine])}}
    return config


def measure(args: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    """All runs, alternating placements within a seed."""
    found = []
    for seed in args.seeds:
        args.seed = seed
        data = scratch / f"data-{seed}"
        prepare(["--out", str(data), "--seed", str(seed)])
        for engine in args.engines:
            for layout in args.layouts:
                for placement in args.placements:
                    name = f"{engine}-{layout}-{placement}-{seed}"
                    began = time.monotonic()
                    config = config_of(data, scratch / name, args, engine, layout, placement)
                    run = run_mesh(config, timeout_s=3600.0)
                    curve = {str(row["step"]): row["reward"] for row in run.summary["held_out"]}
                    one = {"engine": engine, "layout": layout, "placement": placement, "seed": seed, "curve": curve}
                    one |= {"ledger": run.summary["ledger"], "seconds": round(time.monotonic() - began, 1)}
                    one |= {name: run.steps[-1].get(f"placement/{name}") for name in ("turns", "swap_share")}
                    print(json.dumps(one), flush=True)
                    found.append(one)
                    if args.json:
                        write_json(args.json, {"benchmark": "placement_learning", "machine": machine(), "runs": found})
    return found


def rows(found: Sequence[dict[str, Any]]) -> list[list[object]]:
    """One row per engine, layout and placement: mean and range over seeds at each evaluated step."""
    keys = sorted({(run["engine"], run["layout"], run["placement"]) for run in found})
    lines: list[list[object]] = []
    for key in keys:
        runs = [run for run in found if (run["engine"], run["layout"], run["placement"]) == key]
        steps = sorted(set.intersection(*(set(map(int, run["curve"])) for run in runs)))
        curve = []
        for step in steps:
            values = [run["curve"][str(step)] for run in runs]
            curve.append(f"{step}: {fmean(values):.3f} [{min(values):.3f} .. {max(values):.3f}]")
        lines.append([*key, len(runs), "; ".join(curve)])
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Runs everything; prints a table and writes every curve to --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=("hf", "vllm", "sglang"), default=["hf"], help="of generators")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="of the learner")
    parser.add_argument("--placements", nargs="+", default=["split", "collocated"], help="compared")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of data, model and run")
    parser.add_argument("--steps", type=int, default=300, help="of each run")
    parser.add_argument("--vllm-python", type=Path, default=REPOSITORY / ".venv-vllm" / "bin" / "python")
    parser.add_argument("--sglang-python", type=Path, default=REPOSITORY / ".venv-sglang" / "bin" / "python")
    parser.add_argument("--json", type=Path, help="file to write")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="rollmesh-learning-") as scratch:
        found = measure(args, Path(scratch))
    print(table(("engine", "learner", "placement", "seeds", "held-out reward by step: mean [range]"), rows(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
