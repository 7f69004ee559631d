"""`python -m examples.demo [--task T] [--seed N] [--section.key=value ...]`: prepares the data, then runs the mesh."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

CONFIG = Path(__file__).with_name("demo.yaml")


def main() -> int:
    """Prepares and runs; the exit status is that of `rollmesh run`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="arithmetic")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/demo-data"))
    options, overrides = parser.parse_known_args()
    chosen = ["--task", options.task, "--seed", str(options.seed), "--out", str(options.out)]
    subprocess.run([sys.executable, "-m", "examples.demo.prepare", *chosen], check=True)
    places = [
        f"--model.path={options.out / 'model'}",
        f"--data.train={options.out / 'train.parquet'}",
        f"--data.eval={options.out / 'eval.parquet'}",
        f"--run.seed={options.seed}",
    ]
    return subprocess.run([sys.executable, "-m", "rollmesh.cli", "run", str(CONFIG), *places, *overrides]).returncode


if __name__ == "__main__":
    sys.exit(main())
