"""`python -m examples.demo [--task T] [--seed N] [--section.key=value ...]`: prepares the data, then runs the mesh."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

CONFIG = Path(__file__).with_name("demo.yaml")
# A program has more tokens than a number, and its cases are run: once for equal programs, which draw no numbers here.
_PROGRAMS = (
    "--rollout.max_response_tokens=14",
    "--reward.functions=[code]",
    "--reward.cache.functions=[code]",
    "--eval.stop_at=0.6",
)


def main() -> None:
    """Prepares, and becomes `rollmesh run`, so that signals and exit status are its own."""
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
    programs = _PROGRAMS if options.task == "code" else ()
    command = [sys.executable, "-m", "rollmesh.cli", "run", str(CONFIG), *places, *programs, *overrides]
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
