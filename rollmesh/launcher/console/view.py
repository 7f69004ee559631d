"""Views of a run: a live table in a terminal, plain lines elsewhere.

Invariant: a view only shows; the run is the same with every view, read or not.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import IO, Protocol, TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rollmesh.launcher.console.output import BufferedOutput
from rollmesh.launcher.logs import readable
from rollmesh.launcher.mesh_client import Snapshot
from rollmesh.launcher.placement.turns import sleep_text, turns_text
from rollmesh.mesh.tables import TRAIN
from rollmesh.protos import membership_pb2
from rollmesh.report.failures import failures_text
from rollmesh.report.metrics import REWARD, Record, is_evaluation, is_training, metric_value
from rollmesh.report.table_lines import table_lines
from rollmesh.report.unscored import UnscoredMembers

_ROLES = {
    membership_pb2.ROLE_LEARNER: "learner",
    membership_pb2.ROLE_GENERATOR: "generator",
    membership_pb2.ROLE_REWARD: "reward",
    membership_pb2.ROLE_BUFFER: "buffer",
    membership_pb2.ROLE_MODEL: "model",
}
# Latest events below the live table, and at its end, when the summary is among them.
_EVENTS, _LAST_EVENTS = 8, 32
# Seconds without a report for which a speed holds.
_HOLDS_S = 5.0


class View(Protocol):
    """Shows a run; called on the launcher's event loop, so no call but `close` waits.

    Attributes:
        write_error: why the latest text could not be shown; empty where it could.
    """

    @property
    def write_error(self) -> str: ...

    def event(self, text: str) -> None:
        """Shows an event: a start, a death, a restart."""

    def tail(self, service: str, lines: Sequence[str]) -> None:
        """Shows the last log lines of a service that failed."""

    def update(self, snapshot: Snapshot, records: Sequence[Record]) -> None:
        """Shows the mesh as it is now, with the new metrics records."""

    def close(self) -> None:
        """Ends the view."""


def open_view(every_steps: int) -> View:
    """The live view where stdout is a terminal, plain lines elsewhere.

    Args:
        every_steps: training steps between plain lines.
    """
    if sys.stdout is None:
        return SilentView()
    return LiveView() if sys.stdout.isatty() else PlainView(every_steps)


class SilentView:
    """Shows nothing (the Python API with `quiet`; stdout is closed)."""

    write_error = ""

    def event(self, text: str) -> None:
        pass

    def tail(self, service: str, lines: Sequence[str]) -> None:
        pass

    def update(self, snapshot: Snapshot, records: Sequence[Record]) -> None:
        pass

    def close(self) -> None:
        pass


class PlainView:
    """One line per event, per evaluation and per interval of steps.

    Args:
        every_steps: training steps between lines.
        stream: takes the lines; None: stdout.
    """

    def __init__(self, every_steps: int, stream: TextIO | None = None) -> None:
        self._every = every_steps
        self._output = BufferedOutput(stream or sys.stdout)
        self._console = Console(
            file=cast(IO[str], self._output), highlight=False, soft_wrap=True, markup=False, emoji=False
        )
        self._stalled_s = self._next_report_s = 0.0
        self._speed = SpeedMeter()
        self._unscored = UnscoredMembers()
        self._failures = ""

    @property
    def write_error(self) -> str:
        return self._output.write_error

    def event(self, text: str) -> None:
        self._console.print(f"{_clock()} {text}")

    def tail(self, service: str, lines: Sequence[str]) -> None:
        self._console.print(f"--- last lines of {service}.log ---")
        for line in lines:
            self._console.print(f"  {readable(line)}")

    def update(self, snapshot: Snapshot, records: Sequence[Record]) -> None:
        self._speed.observe(time.monotonic(), snapshot.generated_tokens)
        for record in records:
            self._unscored.add([record])
            if is_evaluation(record):
                self.event(evaluation_line(record))
            elif is_training(record) and int(record["step"]) % self._every == 0:
                parts = [training_line(record, self._speed.since_last()), snapshot.who_waits(), self._unscored.text()]
                self.event(" | ".join(filter(None, [*parts, self._new_failures(snapshot)])))
                self._unscored = UnscoredMembers()
        if snapshot.table is not None:
            self._show_stall(snapshot)

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


class LiveView:
    """A table that is drawn again and again, with the latest events below it."""

    def __init__(self) -> None:
        self._output = BufferedOutput(sys.stdout)
        self._console = Console(file=cast(IO[str], self._output))
        self._events: list[str] = []
        self._shown = _EVENTS
        self._snapshot = Snapshot(trouble="starting")
        self._live = Live(console=self._console, refresh_per_second=2, get_renderable=self._render, transient=False)
        self._live.start()

    @property
    def write_error(self) -> str:
        return self._output.write_error

    def event(self, text: str) -> None:
        self._events = [*self._events, f"{_clock()} {text}"][-_LAST_EVENTS:]

    def tail(self, service: str, lines: Sequence[str]) -> None:
        body = "\n".join(f"  {readable(line)}" for line in lines)
        self._console.print(Text(f"--- last lines of {service}.log ---\n{body}"))

    def update(self, snapshot: Snapshot, records: Sequence[Record]) -> None:
        self._snapshot = snapshot
        for record in records:
            if is_evaluation(record):
                self.event(evaluation_line(record))

    def close(self) -> None:
        self._shown = _LAST_EVENTS
        self._live.refresh()
        self._live.stop()
        self._output.close()

    def _render(self) -> RenderableType:
        events = Text("\n".join(self._events[-self._shown :]), style="dim")
        return Group(status_table(self._snapshot), members_table(self._snapshot.members), events)


class SpeedMeter:
    """Tokens sampled per second from one line to the next, from the generators' reports about every second.

    The time before the first token does not count. Where nothing was reported between two lines, the last speed holds
    for a while.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        # (Time, tokens) of the last report, and of the last one before the last line.
        self._reported: tuple[float, float] | None = None
        self._shown: tuple[float, float] | None = None
        self._speed: float | None = None

    def observe(self, now_s: float, tokens: float) -> None:
        """Records the run's total."""
        if self._reported is None or tokens > self._reported[1]:
            self._shown = self._shown or (self._reported and (self._now_s, self._reported[1]))
            self._reported = (now_s, tokens)
        self._now_s = now_s

    def since_last(self) -> float | None:
        """Speed over the reports since the last call; None before there were any."""
        if self._shown is not None and self._reported is not None:
            (before_s, before), (now_s, tokens) = self._shown, self._reported
            if now_s > before_s:
                self._speed = (tokens - before) / (now_s - before_s)
            elif self._now_s - now_s > _HOLDS_S:
                self._speed = 0.0
            self._shown = self._reported
        return self._speed


def training_line(record: Record, generated_per_s: float | None) -> str:
    """A training step in one line."""
    trained = _number(record, "tokens_per_second", ".0f")
    return (
        f"step {record['step']}: reward {_number(record, REWARD, '.3f')}, "
        f"staleness {_number(record, 'staleness/mean', '.2f')}, "
        f"tokens/s {'-' if generated_per_s is None else f'{generated_per_s:.0f}'} generated {trained} trained"
    )


def evaluation_line(record: Record) -> str:
    """An evaluation round in one line."""
    reward, failed = _number(record, "eval/reward", ".3f"), int(metric_value(record, "eval/failed") or 0)
    asked = failed + int(metric_value(record, "eval/scored") or 0)
    left_out = f" ({failed} of {asked} responses have no reward and are left out)" if failed else ""
    return f"step {record['step']}: held-out reward {reward}{left_out}"


def ledger_line(snapshot: Snapshot) -> str:
    """Counts of the admitted groups by state."""
    if snapshot.table is None:
        return "-"
    counts = snapshot.table.counts
    return (
        f"admitted {counts.admitted} = generating {counts.generating} + ready {counts.ready} + "
        f"leased {counts.leased} + trained, not yet committed {counts.consumed} + "
        f"trained and committed {counts.trained} + "
        f"stale {counts.evicted_stale} + filtered {counts.filtered} + failed {counts.failed}"
    )


def status_table(snapshot: Snapshot) -> Table:
    """The run's metrics, one per row."""
    table = Table(box=None, show_header=False, padding=(0, 2))
    record, described = snapshot.training, snapshot.table
    table.add_row("reward", f"{_number(record, REWARD, '.3f')} in training")
    table.add_row("held-out", f"{_number(snapshot.evaluation, 'eval/reward', '.3f')}")
    if described is not None:
        policy = described.policy
        table.add_row("version", f"{policy.version} (incarnation {policy.incarnation})")
        bound = f"at most {described.max_staleness}"
        table.add_row("staleness", f"{_number(record, 'staleness/mean', '.2f')} mean, {bound}")
    trained = _number(record, "tokens_per_second", ".0f")
    # Generators that have left take their counts with them.
    speed, so_far = snapshot.sum_of("tokens_per_second"), snapshot.generated_tokens
    so_far = so_far or snapshot.sum_of("tokens_generated")
    table.add_row("tokens/s", f"{speed:.0f} generated just now ({so_far:.0f} tokens so far), {trained} trained")
    if unscored := snapshot.without_reward():
        table.add_row("unscored", unscored)
    if snapshot.stalled_s:
        table.add_row("stalled", snapshot.stall())
    table.add_row("waiting", snapshot.who_waits())
    if snapshot.placement:
        table.add_row("placement", snapshot.placement)
    if snapshot.turns is not None:
        table.add_row("turn", turns_text(snapshot.turns, starting=snapshot.generators_start))
    if snapshot.turn_time:
        table.add_row("time", snapshot.turn_time)
    if snapshot.sleep:
        table.add_row("sleep", sleep_text(snapshot.sleep))
    table.add_row("ledger", ledger_line(snapshot))
    if described is not None:
        for title, text in table_lines(described):
            table.add_row(title, text)
    return table


def members_table(everyone: Sequence[membership_pb2.Member]) -> Table:
    """The members of the mesh as a table."""
    table = Table(box=None, padding=(0, 2))
    endpoints = any(member.endpoint for member in everyone)
    for title in ("member", "role", "address", "serves", "tokens/s", "heartbeat", "waits for"):
        table.add_column(title)
    if endpoints:
        table.add_column("endpoint", overflow="fold")
    for member in sorted(everyone, key=lambda item: (item.role, item.member_id)):
        policy = member.serving
        serving = f"version {policy.version} (incarnation {policy.incarnation})" if policy.incarnation else "-"
        speed = member.gauges.get("tokens_per_second")
        table.add_row(
            *(member.member_id, _ROLES.get(member.role, "?"), member.address or "-", serving),
            *("-" if speed is None else f"{speed:.0f}", f"{member.heartbeat_age_ms / 1000:.1f} s"),
            member.waiting_reason or "-",
            *([f"{member.endpoint}/v1" if member.endpoint else "-"] if endpoints else []),
        )
    return table


def pushes_table(rows: Sequence[Sequence[str]]) -> Table:
    """The way of the weights to each generator: the last push, and p50 / p99 of all; the first row is the head."""
    head, *body = rows
    table = Table(box=None, padding=(0, 2))
    for title in head:
        table.add_column(title, overflow="fold")
    for row in body:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _number(record: Record, name: str, form: str) -> str:
    value = record.get(name)
    return format(value, form) if isinstance(value, int | float) else "-"


def _clock() -> str:
    return time.strftime("%H:%M:%S")
