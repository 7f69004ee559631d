"""Cost of the test suite: CPU seconds and tests by folder, and the processes that it starts, by kind.

Runs `make test-mesh`, then `make test-engines`, each alone; `--clone` those of another clone, for a comparison in the
same conditions. A process counts if it lived for 50 ms. The title of a forked process says its kind.

    python -m benchmarks.suite --json suite.json
"""

from __future__ import annotations

import argparse
import re
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common import REPOSITORY, HelpFormatter, machine, table, write_json, yardstick
from tests.suite.results import Results

_EVERY_S = 0.05
# The first that is found in a command line.
_KINDS = {
    "vLLM engine": r"EngineCore|VLLM::",
    "SGLang": r"sglang",
    "run": r"rollmesh(\.cli)? (run|eval|generate)\b",
    "trainer": r"rollmesh(\.cli)? (sft|rm|dpo)\b",
    "learner": r"rollmesh(\.cli)? (learner|evaluator)\b",
    "role": r"rollmesh(\.cli)? role\b",
    "generator": r"rollmesh(\.cli)? generator\b",
    "buffer": r"rollmesh(\.cli)? buffer\b",
    "reward service": r"rollmesh(\.cli)? reward serve\b",
    "reward worker": r"reward_service[./]workers",
    "sandbox": r"sandbox|zygote",
    "fork server": r"fork server",
    "other rollmesh commands": r"rollmesh(\.cli)? \w+",
    "ranks of tests": r"rank",
    "test worker": r"execnet|pytest",
    "browser": r"chrom",
    "Redis": r"redis-server",
    "other Python": r"python",
}


class ProcessCounter:
    """Counts the processes below one, by kind, until it is closed."""

    def __init__(self, root: int) -> None:
        self._commands: dict[int, str] = {root: "make"}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> Counter[str]:
        """Ends the count and returns it."""
        self._over.set()
        self._thread.join()
        return Counter(map(_kind, self._commands.values()))

    def _watch(self) -> None:
        while not self._over.wait(_EVERY_S):
            for pid, parent, command in _processes():
                if pid in self._commands or parent in self._commands:
                    # A process that was forked is seen as its parent first.
                    self._commands[pid] = command or self._commands.get(pid, "")


def _processes() -> Iterator[tuple[int, int, str]]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            except OSError:
                continue
            yield int(folder.name), parent, command


def _kind(command: str) -> str:
    return next((kind for kind, pattern in _KINDS.items() if re.search(pattern, command)), "other programs")


def measure(target: str, clone: Path) -> dict[str, Any]:
    """Runs one target of the Makefile in a clone, and returns what it has used."""
    began = time.monotonic()
    process = subprocess.Popen(["make", target], cwd=clone)
    counter = ProcessCounter(process.pid)
    status = process.wait()
    starts = counter.close()
    return {"target": target, "status": status, "minutes": (time.monotonic() - began) / 60, "starts": starts}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--clone", type=Path, default=REPOSITORY)
    parser.add_argument("--targets", nargs="+", default=["test-mesh", "test-engines"])
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    runs = [{**measure(target, options.clone), "after": yardstick()} for target in options.targets]
    results = Results.read(sorted((options.clone / ".make" / "results").glob("*.json")))
    folders = sorted(results.folders.items())
    write_json(
        options.json,
        {
            "machine": machine(),
            "runs": runs,
            "cpu_s": results.cpu_s,
            "folders": {name: asdict(usage) for name, usage in folders},
        },
    )
    print(table(("folder", "tests", "CPU s"), ((name, use.tests, f"{use.cpu_s:.1f}") for name, use in folders)))
    print(table(("processes", "starts"), sum((run["starts"] for run in runs), Counter[str]()).most_common()))
    print(f"{sum(run['minutes'] for run in runs):.1f} minutes, {results.cpu_s:.0f} CPU seconds")


if __name__ == "__main__":
    main()
