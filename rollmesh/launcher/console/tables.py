"""The state of a mesh as tables, as wide as the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from rollmesh.launcher.console.lines import ledger_line, number
from rollmesh.launcher.console.members_table import WIDE
from rollmesh.launcher.mesh_client import Snapshot
from rollmesh.launcher.placement.turns import sleep_text, turns_text
from rollmesh.report.metrics import REWARD
from rollmesh.report.table_lines import table_lines


def status_table(snapshot: Snapshot) -> Table:
    """The run's metrics, one per row."""
    table = Table(box=None, show_header=False, padding=(0, 2))
    record, described = snapshot.training, snapshot.table
    table.add_row("reward", f"{number(record, REWARD, '.3f')} in training")
    table.add_row("held-out", f"{number(snapshot.evaluation, 'eval/reward', '.3f')}")
    if described is not None:
        policy = described.policy
        table.add_row("version", f"{policy.version} (incarnation {policy.incarnation})")
        bound = f"at most {described.max_staleness}"
        table.add_row("staleness", f"{number(record, 'staleness/mean', '.2f')} mean, {bound}")
    trained = number(record, "tokens_per_second", ".0f")
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


def pushes_table(rows: Sequence[Sequence[str]], columns: int = WIDE) -> Table:
    """The way of the weights to each generator: the last push, and p50 / p99 of all.

    Args:
        rows: the first one is the head.
        columns: of the terminal; in a narrow one each generator has its values in words.
    """
    head, *body = rows
    table = Table(box=None, padding=(0, 2))
    if columns < WIDE:
        table.add_column(head[0], overflow="fold")
        table.add_column("weights: the last push, and p50 / p99 of all", overflow="fold")
        for name, *cells in body:
            values = zip(head[1:], cells, strict=True)
            table.add_row(Text(name), Text(", ".join(f"{title} {cell}" for title, cell in values)))
        return table
    for title in head:
        table.add_column(title, overflow="fold")
    for row in body:
        table.add_row(*(Text(cell) for cell in row))
    return table
