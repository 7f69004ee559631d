"""Drives a real `rollmesh run` in a process of its own and audits what it leaves behind."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from rollmesh.learner.recovery.consumption_log import read_log, surviving_uses
from tests import fork_server
from tests.repository import REPOSITORY
from tests.signals import handled

# On a busy machine the processes of a run start in minutes.
DEADLINE_S = 600.0


class MeshRun:
    """`rollmesh run` on an example's data, the demonstration's by default; its output lines are the events that tests
    wait for."""

    def __init__(
        self,
        data: Path,
        folder: Path,
        *overrides: str,
        env: Mapping[str, str] | None = None,
        cwd: Path = REPOSITORY,
        config: str = "examples/demo/demo.yaml",
        module: str = "rollmesh.cli",
    ) -> None:
        self.folder = folder / "run"
        self.lines: list[str] = []
        self._events: queue.Queue[str | None] = queue.Queue()
        arguments = [
            f"--run.dir={folder}",
            "--run.name=run",
            f"--model.path={data / 'model'}",
            f"--data.train={data / 'train.parquet'}",
            f"--data.eval={data / 'eval.parquet'}",
            "--logging.console_every_steps=1",
            "--eval.rows=16",
            *overrides,
        ]
        with handled(signal.SIGINT, signal.default_int_handler):
            self.process = fork_server.popen(
                ["run", str(REPOSITORY / config), *arguments],
                cwd=cwd,
                module=module,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                # Lines are not broken for any width.
                env={**os.environ, "COLUMNS": "1000", **(env or {})},
            )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            self._events.put(line)
        self._events.put(None)

    def wait_for(self, pattern: str, deadline_s: float = DEADLINE_S) -> re.Match[str]:
        """The next output line that matches.

        Raises:
            AssertionError: the run ended or the deadline passed first; shows the output.
        """
        until = time.monotonic() + deadline_s
        while True:
            try:
                line = self._events.get(timeout=max(0.01, until - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no line like {pattern!r} within {deadline_s} s:\n" + self.tail()) from None
            if line is None:
                raise AssertionError(f"the run ended without a line like {pattern!r}:\n" + self.tail())
            if match := re.search(pattern, line):
                return match

    def wait_for_each(self, *patterns: str, deadline_s: float = DEADLINE_S) -> None:
        """Waits until each has had an output line, in any order; each line counts for one."""
        left, until = list(patterns), time.monotonic() + deadline_s
        while left:
            line = self.wait_for("|".join(left), until - time.monotonic()).string
            left.remove(next(pattern for pattern in left if re.search(pattern, line)))

    def wait_step(self, step: int, deadline_s: float = DEADLINE_S) -> None:
        """Waits until a step >= `step` is reported."""
        while int(self.wait_for(r"\bstep (\d+) of \d+: reward", deadline_s)[1]) < step:
            pass

    def last_step(self) -> int:
        return max(
            (int(m[1]) for line in self.lines if (m := re.search(r"\bstep (\d+) of \d+: reward", line))), default=0
        )

    def pid(self, service: str) -> int:
        """The process of a service, which is waited for: steps of a continued run need no service but the learner."""
        ready, until = self.folder / "services" / f"{service}.json", time.monotonic() + DEADLINE_S
        while not ready.exists():
            assert time.monotonic() < until, f"{service} is not ready:\n" + self.tail()
            time.sleep(0.05)
        return int(json.loads(ready.read_text())["pid"])

    def address(self) -> str:
        return str(json.loads((self.folder / "mesh.json").read_text())["address"])

    def doors(self) -> dict[str, str]:
        """URLs that the latest launch's services have told their logs, by `SERVICE metrics` and `SERVICE endpoint`."""
        found = {}
        for log in (self.folder / "logs").glob("*.log"):
            for what, url in re.findall(r"\b(metrics|endpoint) at (https?://[\w.:/]+)", log.read_text()):
                found[f"{log.stem} {what}"] = url
        return found

    def kill9(self, service: str) -> None:
        os.kill(self.pid(service), signal.SIGKILL)

    def finish(self, deadline_s: float = DEADLINE_S) -> int:
        """Waits for the run's end; its exit code."""
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run did not end within {deadline_s} s:\n" + self.tail()) from None

    def tail(self, count: int = 40) -> str:
        return "\n".join(self.lines[-count:])

    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "summary.json").read_text()))

    def metric(self, name: str) -> list[float]:
        """By step, of those that have it."""
        records = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return [record[name] for record in records if name in record]

    def trend(self, name: str) -> tuple[float, float]:
        """Means of a metric over the first and the last fifth of the steps."""
        found = self.metric(name)
        fifth = len(found) // 5
        return fmean(found[:fifth]), fmean(found[-fifth:])

    def close(self) -> None:
        """Ends the launcher, whatever state it is in; its services end with it."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(240)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(60)


def audit(run: MeshRun) -> None:
    """The ledger balances, and the consumption log says that nothing was trained twice on the surviving lineage."""
    ledger = run.summary()["ledger"]
    for table in ("train", "eval"):
        assert ledger[table]["discrepancies"] == [], ledger[table]
    counters = ledger["train"]["counters"]
    fates = sum(counters[name] for name in ("trained", "evicted_stale", "filtered", "failed"))
    live = sum(counters[name] for name in ("generating", "ready", "leased", "consumed"))
    assert counters["admitted"] == fates + live, counters
    uses = surviving_uses(list(read_log(run.folder / "consumption.jsonl")))
    trained = Counter((group.group_id, group.use) for use in uses for group in use.groups)
    assert [group for group, times in trained.items() if times > 1] == []
    assert len(trained) == counters["trained"] + counters["consumed"], (len(trained), counters)
    versions = [use.train_version for use in uses]
    assert versions == list(range(len(versions))), "every version of the surviving lineage was trained once"
