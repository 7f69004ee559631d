"""The view without a terminal: plain lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import IO, TextIO, cast

from rich.console import Console

from rollmesh.launcher.console.bottleneck import Bottleneck, WaitShares
from rollmesh.launcher.console.lines import evaluation_line, training_line
from rollmesh.launcher.console.output import BufferedOutput
from rollmesh.launcher.console.progress import Progress
from rollmesh.launcher.console.speed_meter import SpeedMeter
from rollmesh.launcher.console.text import clock, fitted, plain_columns
from rollmesh.launcher.logs import readable
from rollmesh.launcher.mesh_client import Snapshot
from rollmesh.mesh.tables import TRAIN
from rollmesh.report.failures import failures_text
from rollmesh.report.metrics import Record, is_evaluation, is_training
from rollmesh.report.unscored import UnscoredMembers


class PlainView:
    """One line per event, per evaluation and per interval of steps.

    Args:
        every_steps: training steps between lines.
        stream: takes the lines; None: stdout.
        progress: of the run that is shown; None: nothing trains.
    """

    def __init__(self, every_steps: int, stream: TextIO | None = None, *, progress: Progress | None = None) -> None:
        self._every = every_steps
        self._output = BufferedOutput(stream or sys.stdout)
        self._console = Console(
            file=cast(IO[str], self._output), highlight=False, soft_wrap=True, markup=False, emoji=False
        )
        self._columns = plain_columns()
        self._stalled_s = self._next_report_s = 0.0
        self._speed = SpeedMeter()
        self._unscored = UnscoredMembers()
        self._failures = ""
        self._trains = progress is not None
        self._progress = progress or Progress()
        self._bottleneck = Bottleneck()
        self._advice = ""
        self._rewards_advice = ""
        self._branches = ""

    @property
    def write_error(self) -> str:
        return self._output.write_error

    def event(self, text: str) -> None:
        self._console.print(fitted(f"{clock()} {text}", self._columns))

    def tail(self, service: str, lines: Sequence[str]) -> None:
        self._console.print(f"--- last lines of {service}.log ---")
        for line in lines:
            self._console.print(f"  {readable(line)}")

    def update(self, snapshot: Snapshot, records: Sequence[Record]) -> None:
        now = time.monotonic()
        self._speed.observe(now, snapshot.generated_tokens)
        # Before the first step everyone waits for what loads.
        shares = self._bottleneck.observe(now, snapshot) if self._progress.step else None
        for record in records:
            self._progress.add([record])
            self._unscored.add([record])
            if is_evaluation(record):
                self.event(evaluation_line(record, self._progress))
            elif is_training(record) and int(record["step"]) % self._every == 0:
                self._show_step(record, snapshot, shares)
        if snapshot.table is not None:
            self._show_stall(snapshot)

    def _show_step(self, record: Record, snapshot: Snapshot, shares: WaitShares | None) -> None:
        """Shows a step, and what has come up since the last one that was shown."""
        line = training_line(record, self._progress, self._speed.since_last())
        self.event(f"{line}; {shares}" if shares is not None else line)
        advice = shares.advice if shares is not None and self._trains else ""
        of_rewards = self._progress.advice if self._trains else ""
        news = [
            self._unscored.text(),
            self._new_failures(snapshot),
            advice if advice != self._advice else "",
            of_rewards if of_rewards != self._rewards_advice else "",
            # Once in a run: the share changes with each step.
            "" if self._branches else self._progress.branches,
        ]
        self._branches = self._branches or news[-1]
        self._unscored, self._advice = UnscoredMembers(), advice or self._advice
        self._rewards_advice = of_rewards
        for text in filter(None, news):
            self.event(text)

    def _new_failures(self, snapshot: Snapshot) -> str:
        """Counts of training groups that have failed so far; empty where they are unchanged."""
        if snapshot.table is None:
            return ""
        before, self._failures = self._failures, failures_text(TRAIN, snapshot.table.counts.reasons)
        return self._failures if self._failures != before else ""

    def _show_stall(self, snapshot: Snapshot) -> None:
        """Shows a stall when it begins, whenever it has lasted twice as long, and when it is over."""
        before, self._stalled_s = self._stalled_s, snapshot.stalled_s
        if self._stalled_s > self._next_report_s:
            self._next_report_s = 2 * self._stalled_s
            self.event(f"stalled {snapshot.stall()}")
        elif before and not self._stalled_s:
            self._next_report_s = 0.0
            self.event(f"groups move again, after {before:.0f} s")

    def close(self) -> None:
        self._output.close()
