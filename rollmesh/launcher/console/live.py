"""The live view of a terminal: run, progress, learning, a sample, waits, generators, the latest events."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import IO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollmesh.launcher.console.bottleneck import Bottleneck, WaitShares
from rollmesh.launcher.console.generators_table import generators_table
from rollmesh.launcher.console.learning_metrics import model_parts, response_parts
from rollmesh.launcher.console.lines import evaluation_line, number
from rollmesh.launcher.console.output import BufferedOutput
from rollmesh.launcher.console.progress import Progress
from rollmesh.launcher.console.text import clock, compact, duration, fitted, shortened
from rollmesh.launcher.logs import readable
from rollmesh.launcher.mesh_client import Snapshot
from rollmesh.launcher.placement.turns import turns_text
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.tables import TRAIN
from rollmesh.report.failures import failures_text
from rollmesh.report.metrics import REWARD, Record, is_evaluation

# Latest events below the tables, and at the end, when the summary is among them.
_EVENTS, _LAST_EVENTS = 8, 32
_TITLE = 10


class LiveView:
    """A page that is drawn again and again, with the latest events below it.

    Args:
        config: of the run.
    """

    def __init__(self, config: Config) -> None:
        self._output = BufferedOutput(sys.stdout)
        self._console = Console(file=cast(IO[str], self._output), markup=False, emoji=False)
        self._config = config
        self._progress = Progress.of_run(config)
        self._bottleneck = Bottleneck()
        self._shares: WaitShares | None = None
        self._events: list[str] = []
        self._shown = _EVENTS
        self._snapshot = Snapshot(trouble="starting", learner_starts=True)
        self._live = Live(console=self._console, refresh_per_second=2, get_renderable=self._render, transient=False)
        self._live.start()

    @property
    def write_error(self) -> str:
        return self._output.write_error

    def event(self, text: str) -> None:
        self._events = [*self._events, f"{clock()} {text}"][-_LAST_EVENTS:]

    def tail(self, service: str, lines: Sequence[str]) -> None:
        body = "\n".join(f"  {readable(line)}" for line in lines)
        self._console.print(Text(f"--- last lines of {service}.log ---\n{body}"))

    def update(self, snapshot: Snapshot, records: Sequence[Record]) -> None:
        self._snapshot = snapshot
        self._progress.add(records)
        # Before the first step everyone waits for what loads.
        self._shares = self._bottleneck.observe(time.monotonic(), snapshot) if self._progress.step else None
        for record in records:
            if is_evaluation(record):
                self.event(evaluation_line(record, self._progress))

    def close(self) -> None:
        self._shown = _LAST_EVENTS
        self._live.refresh()
        self._live.stop()
        self._output.close()

    def _render(self) -> RenderableType:
        columns = self._console.width
        events = Text("\n".join(fitted(event, columns) for event in self._events[-self._shown :]), style="dim")
        page = [run_page(self._config, self._snapshot, self._progress, self._shares, columns)]
        if self._snapshot.generators():
            page += [Text(), generators_table(self._snapshot, columns)]
        return Group(*page, Text(), events)


def run_page(
    config: Config, snapshot: Snapshot, progress: Progress, shares: WaitShares | None, columns: int
) -> RenderableType:
    """The state of a run: how far it is, what it learns, who waits and what to do about it.

    Args:
        config: of the run.
        snapshot: of now.
        progress: of the run so far.
        shares: who has waited of late; None: not known.
        columns: of the terminal.
    """
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold", min_width=_TITLE, no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(config.run.name, f"{config.algorithm.name} on {config.model.path}, in {config.run.folder}")
    grid.add_row("step", _progress_row(progress, columns))
    for title, text in _rows(snapshot, progress, shares, columns):
        grid.add_row(title, Text(text))
    return grid


def _progress_row(progress: Progress, columns: int) -> RenderableType:
    text = f"{progress.step} of {progress.steps}" if progress.steps else str(progress.step)
    if (left := progress.left_s) is not None:
        text += f", {duration(left)} left" if left else ""
    if (speed := progress.seconds_per_step) is not None:
        text += f", {speed:.2g} s a step"
    bar = ProgressBar(total=progress.steps or None, completed=progress.step, width=max(10, min(40, columns - 56)))
    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_row(bar, Text(text)) if progress.steps else row.add_row(Text(text))
    return row


def _rows(snapshot: Snapshot, progress: Progress, shares: WaitShares | None, columns: int) -> Iterator[tuple[str, str]]:
    record = snapshot.training
    if progress.step:
        yield "reward", _reward_text(record, progress)
        if parts := model_parts(record):
            yield "learning", ", ".join(parts)
        if parts := response_parts(record):
            bound = f" of {snapshot.table.max_staleness}" if snapshot.table is not None else ""
            yield "responses", ", ".join(parts) + bound
        sampled, trained = snapshot.sum_of("tokens_per_second"), number(record, "tokens_per_second", ".0f")
        yield (
            "tokens/s",
            f"{sampled:.0f} generated, {trained} trained; {compact(snapshot.generated_tokens)} generated so far",
        )
    if snapshot.sample:
        yield "sample", _sample_text(snapshot.sample, columns - _TITLE - 4)
    if unscored := snapshot.without_reward():
        yield "unscored", unscored
    if snapshot.table is not None and (failed := failures_text(TRAIN, snapshot.table.counts.reasons)):
        yield "failed", failed
    if snapshot.stalled_s:
        yield "stalled", snapshot.stall()
    yield "now", snapshot.who_waits()
    if shares is not None and progress.step:
        yield (
            "waited",
            f"learner {shares.learner:.0%}, generators {shares.generators:.0%} of the last {shares.seconds:.0f} s",
        )
        if shares.advice:
            yield "to do", shares.advice
    if progress.advice:
        yield "to do", progress.advice
    if branches := progress.branches:
        yield "branches", branches
    if snapshot.placement:
        yield "placement", snapshot.placement
    if snapshot.turns is not None:
        yield "turn", turns_text(snapshot.turns, starting=snapshot.generators_start)


def _reward_text(record: Record, progress: Progress) -> str:
    """Training reward of the last step and of recent ones, and the held-out one: first, best and last."""
    text = f"{number(record, REWARD, '.3f')} in training"
    if progress.reward is not None:
        text += f" ({progress.reward:.3f} of late)"
    if progress.held_out:
        last = max(progress.held_out)
        best = max(progress.held_out, key=lambda step: (progress.held_out[step], -step))
        text += f", held-out {progress.held_out[last]:.3f} at step {last}"
        text += f", best {progress.held_out[best]:.3f} at step {best}" if best != last else ""
    return text


def _sample_text(sample: Record, columns: int) -> str:
    """A trained response in one line, with its reward in front."""
    each = max(10, (columns - 24) // 2)
    prompt, response = (shortened(repr(str(sample.get(key, ""))), each) for key in ("prompt", "response"))
    return f"reward {number(sample, 'reward', '.3g')}: {prompt} -> {response}"
