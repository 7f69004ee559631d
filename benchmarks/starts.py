"""Seconds from Enter to the services and to the first trained step of the demonstration, forked and executed.

Each run is `rollmesh run` on the demonstration's data, as a user starts it. Warm and cold runs alternate. The cold
launcher has an option of the interpreter (`-B`), with which no service is forked; nothing else is different.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import (
    REPOSITORY,
    HelpFormatter,
    Summary,
    cpu_s,
    machine,
    summarize,
    table,
    write_json,
    yardstick,
)
from examples.demo.prepare import prepare
from rollmesh.mesh.runtime.die_with_parent import die_with_parent

_MOMENTS = {
    "buffer": r"\bbuffer is up",
    "reward": r"\breward is up",
    "generator": r"\bgenerator-0 is up",
    "learner": r"\blearner is up",
    "first step": r"\bstep 1 of \d+: reward",
    "end": r"^",
}
_CPU = "CPU seconds"
_OPTIONS = {"warm": (), "cold": ("-B",)}


def run_once(data: Path, folder: Path, options: tuple[str, ...]) -> dict[str, float]:
    """Seconds after the command at which each moment came, and CPU seconds of all processes.

    Raises:
        SystemExit: the run has failed.
    """
    command = [
        *(sys.executable, *options, "-m", "rollmesh.cli", "run", "examples/demo/demo.yaml"),
        *(f"--run.dir={folder}", "--run.name=run", f"--model.path={data / 'model'}"),
        *(f"--data.train={data / 'train.parquet'}", f"--data.eval={data / 'eval.parquet'}"),
        *("--learner.steps=2", "--eval.rows=16", "--logging.console_every_steps=1"),
    ]
    used, began, found, lines = cpu_s(), time.perf_counter(), dict[str, float](), list[str]()
    with subprocess.Popen(
        die_with_parent(command), cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            for name, pattern in _MOMENTS.items():
                if re.search(pattern, line) and (name == "end" or name not in found):
                    found[name] = time.perf_counter() - began
    if process.returncode or found.keys() != _MOMENTS.keys():
        raise SystemExit("".join(lines[-30:]))
    return {**found, _CPU: cpu_s() - used}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="of each kind")
    parser.add_argument("--json", type=Path, help="where to write the results")
    given = parser.parse_args()
    measured: dict[str, list[dict[str, float]]] = {kind: [] for kind in _OPTIONS}
    moods = []
    with tempfile.TemporaryDirectory(prefix="rollmesh-starts-") as scratch:
        data = Path(scratch, "data")
        prepare(data, task="arithmetic", seed=0, largest_digit=4, held_out=32, warm_steps=2)
        for number in range(given.runs):
            for kind, options in _OPTIONS.items():
                moods.append(yardstick())
                measured[kind].append(run_once(data, Path(scratch, f"{kind}-{number}"), options))
    found: dict[str, dict[str, Summary]] = {
        kind: {name: summarize(run[name] for run in runs) for name in (*_MOMENTS, _CPU)}
        for kind, runs in measured.items()
    }
    ratios = {name: found["cold"][name].median / found["warm"][name].median for name in (*_MOMENTS, _CPU)}
    if given.json:
        write_json(given.json, {"machine": machine(), "yardsticks": moods, "seconds": found, "cold / warm": ratios})
    rows = [(name, found["warm"][name], found["cold"][name], f"{ratio:.2f}") for name, ratio in ratios.items()]
    print(table(("s after Enter", "warm", "cold", "cold / warm"), rows))


if __name__ == "__main__":
    main()
