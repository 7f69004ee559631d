"""The record of one call of pytest: what its tests came to, and what they used, by folder.

`make test` calls pytest once per environment. Each call writes its record (`--results FILE`), from which `summary`
makes one account of all.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest
from pydantic import TypeAdapter

from tests.suite.cpu_time import CpuTime, cpu_seconds
from tests.suite.tiers import LEFT_OUT

_KEY = "rollmesh"
# A folder of a package: `tests/learner/engines`.
_DEPTH = 3


@dataclass(slots=True)
class Usage:
    """Cost of a folder's tests: CPU seconds, and seconds on the clock of all workers together."""

    tests: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0


@dataclass(slots=True)
class Results:
    """Results of one or several calls.

    Attributes:
        outcomes: tests by outcome: passed, failed, error, skipped.
        skipped: by reason.
        left_out: tests that were not to run, by reason.
        folders: by name.
        tests: CPU seconds of each.
        collection_cpu_s: CPU seconds before the first test, of all workers.
        starts_cpu_s: CPU seconds for the starts of processes that stay for several tests.
        seconds: on the clock.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    folders: dict[str, Usage] = field(default_factory=dict)
    tests: dict[str, float] = field(default_factory=dict)
    collection_cpu_s: float = 0.0
    starts_cpu_s: float = 0.0
    seconds: float = 0.0

    @property
    def cpu_s(self) -> float:
        return self.collection_cpu_s + self.starts_cpu_s + sum(usage.cpu_s for usage in self.folders.values())

    def add(self, report: pytest.TestReport) -> None:
        """Counts one phase of a test."""
        usage = self.folders.setdefault(folder_of(report.nodeid), Usage())
        usage.wall_s += report.duration
        if outcome := _outcome(report):
            self.outcomes[outcome] += 1
        if report.skipped:
            self.skipped[_reason(report)] += 1
        if report.when == "teardown":
            usage.tests += 1
            self.tests[report.nodeid] = cpu_seconds(report)
            usage.cpu_s += self.tests[report.nodeid]

    def write(self, path: Path) -> None:
        """Writes them as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(TypeAdapter(Results).dump_json(self))

    @classmethod
    def read(cls, paths: Iterable[Path]) -> Self:
        """The sum of several; calls that ran at once count for the longest."""
        total = cls()
        for path in paths:
            found = TypeAdapter(cls).validate_json(path.read_bytes())
            total.outcomes.update(found.outcomes)
            total.skipped.update(found.skipped)
            total.left_out.update(found.left_out)
            total.tests |= found.tests
            total.collection_cpu_s += found.collection_cpu_s
            total.starts_cpu_s += found.starts_cpu_s
            total.seconds = max(total.seconds, found.seconds)
            for folder, usage in found.folders.items():
                before = total.folders.get(folder, Usage())
                total.folders[folder] = Usage(
                    before.tests + usage.tests, before.cpu_s + usage.cpu_s, before.wall_s + usage.wall_s
                )
        return total


class Recorder:
    """Collects the results where a call of pytest is controlled, and writes them at its end.

    Args:
        config: of the call, in a worker or in the process that controls it.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._cpu = CpuTime()
        self._results = Results()
        self._began = time.monotonic()
        config.pluginmanager.register(self._cpu)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Counts a phase."""
        self._results.add(report)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Takes over what only a worker knows."""
        self._take(**getattr(node, "workeroutput", {}).get(_KEY, {}))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        """Writes the record; a worker hands over what only it knows."""
        own = {
            "cpu_s": self._cpu.collection_s,
            "starts_s": self._cpu.starts_s,
            "left_out": self._config.stash.get(LEFT_OUT, {}),
        }
        if (output := getattr(self._config, "workeroutput", None)) is not None:
            output[_KEY] = own
            return
        self._take(**own)
        self._results.seconds = time.monotonic() - self._began
        if (path := self._config.getoption("results")) is not None:
            self._results.write(path)

    def _take(self, cpu_s: float = 0.0, starts_s: float = 0.0, left_out: Mapping[str, int] = {}) -> None:
        self._results.collection_cpu_s += cpu_s
        self._results.starts_cpu_s += starts_s
        # Each worker has left out the same.
        self._results.left_out |= Counter(left_out)


def folder_of(nodeid: str) -> str:
    """The folder of a test, or of a package above it."""
    return "/".join(nodeid.partition("::")[0].split("/")[:-1][:_DEPTH])


def _outcome(report: pytest.TestReport) -> str:
    """The outcome that a phase decides; empty: none."""
    if report.when == "call":
        return report.outcome
    if report.failed:
        return "error"
    return "skipped" if report.skipped and report.when == "setup" else ""


def _reason(report: pytest.TestReport) -> str:
    return str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr).removeprefix("Skipped: ")
