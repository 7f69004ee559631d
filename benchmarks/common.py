"""Parts that every benchmark shares: the machine, a yardstick of that machine's mood, medians with spread, JSON.

A number without its machine is hearsay, and a shared machine is never quite the same twice. So each script stores
`machine()` once and `yardstick()` around every measured run. A reader can see what moved, the code or the host.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parent.parent
_PACKAGES = ("torch", "transformers", "grpcio", "protobuf", "redis")


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """A script's docstring as it stands, and the default of every option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False) else super()._get_help_string(action)


@dataclass(frozen=True, slots=True)
class Summary:
    """Median and range of repeated measurements of one quantity, in that quantity's unit."""

    median: float
    low: float
    high: float
    runs: int

    @property
    def spread(self) -> float:
        """(high - low) / median, dimensionless."""
        return (self.high - self.low) / self.median if self.median else 0.0

    def __str__(self) -> str:
        return f"{self.median:.4g} [{self.low:.4g} .. {self.high:.4g}]"


def summarize(values: Iterable[float]) -> Summary:
    """Summarizes at least one value.

    Raises:
        ValueError: without values.
    """
    found = sorted(values)
    if not found:
        raise ValueError("nothing was measured")
    return Summary(statistics.median(found), found[0], found[-1], len(found))


def machine() -> dict[str, Any]:
    """Cores, processor, memory, versions and the commit measured (with `+` where the tree has changes)."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_model(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "commit": _commit(),
        "started_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def yardstick(seconds: float = 0.3) -> dict[str, float]:
    """One-thread speed of this machine now: interpreter (million loop turns/s), matmul (GFLOP/s, 256 cubed)."""
    import torch

    turns, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds / 2:
        for _ in range(10_000):
            turns += 1
    python_rate = turns / (time.perf_counter() - began)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        square = torch.ones(256, 256)
        products, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds / 2:
            torch.mm(square, square)
            products += 1
        matmul_rate = products * 2 * 256**3 / (time.perf_counter() - began)
    finally:
        torch.set_num_threads(threads)
    return {
        "python_mturns_s": round(python_rate / 1e6, 2),
        "matmul_gflops": round(matmul_rate / 1e9, 1),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def cpu_s() -> float:
    """CPU seconds of this process, and of all that it has started: what a namespace's end kills is in no account."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    living = [each.cpu_times() for each in psutil.Process().children(recursive=True)]
    below = sum(each.user + each.system + each.children_user + each.children_system for each in living)
    return below + sum(each.ru_utime + each.ru_stime for each in used)


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Writes a result file; dataclasses become objects."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, default=_plain) + "\n", encoding="utf-8")


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table, for the terminal and for docs/benchmarks.md alike."""
    lines = [list(header), ["---"] * len(header), *([str(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _plain(value: object) -> object:
    if isinstance(value, Summary):
        return {**asdict(value), "spread": round(value.spread, 4)}
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"cannot write {type(value).__name__} as JSON")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
