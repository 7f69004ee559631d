"""`python -m examples.stages [--seed N]`: all stages, each by the command that is printed before it.

A stage that has ended is not begun again, and one that was interrupted continues: every command does so by itself.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
RUNS = Path("runs/stages")


def commands(seed: int) -> Iterator[list[str]]:
    """The arguments of `rollmesh`, stage by stage."""
    run = f"--run.seed={seed}"
    yield ["sft", str(HERE / "sft.yaml"), run]
    yield ["rm", str(HERE / "rm.yaml"), run]
    yield ["run", str(HERE / "rl.yaml"), run]
    for name, model in (("eval-sft", RUNS / "sft" / "hf" / "last"), ("eval-rl", RUNS / "rl")):
        yield ["eval", str(HERE / "eval.yaml"), "--model", str(model), "--out", str(RUNS / name)]
    yield ["compare", str(RUNS / "eval-sft"), str(RUNS / "eval-rl")]


def main() -> None:
    """Ends with the status of the first command that fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "examples.stages.prepare", "--seed", str(seed)], check=True)
    for arguments in commands(seed):
        print(f"\n$ rollmesh {shlex.join(arguments)}", flush=True)
        status = subprocess.run([sys.executable, "-m", "rollmesh.cli", *arguments], check=False).returncode
        if status:
            sys.exit(status)
    print(f"\nall stages in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
