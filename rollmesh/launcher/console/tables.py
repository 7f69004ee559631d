"""The state of a mesh as tables, as wide as the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from rollmesh.launcher.console.lines import ledger_line, number
from rollmesh.launcher.mesh_client import Snapshot
from rollmesh.launcher.placement.turns import sleep_text, turns_text
from rollmesh.protos import membership_pb2
from rollmesh.report.metrics import REWARD
from rollmesh.report.table_lines import table_lines

_ROLES = {
    membership_pb2.ROLE_LEARNER: "learner",
    membership_pb2.ROLE_GENERATOR: "generator",
    membership_pb2.ROLE_REWARD: "reward",
    membership_pb2.ROLE_BUFFER: "buffer",
    membership_pb2.ROLE_MODEL: "model",
}
# Columns of a terminal from which all of a member is shown.
WIDE = 140


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


def members_table(everyone: Sequence[membership_pb2.Member], columns: int = WIDE) -> Table:
    """The members of the mesh as a table.

    Args:
        everyone: the members.
        columns: of the terminal; in a narrow one the member's id stands for its role, and versions are short.
    """
    wide = columns >= WIDE
    table = Table(box=None, padding=(0, 2) if wide else (0, 1))
    endpoints = any(member.endpoint for member in everyone)
    titles = ["member", "role", "address", "serves", "tokens/s", "heartbeat", "waits for"]
    for title in titles if wide else [title for title in titles if title != "role"]:
        table.add_column(title, overflow="fold")
    if endpoints:
        table.add_column("endpoint", overflow="fold")
    for member in sorted(everyone, key=lambda item: (item.role, item.member_id)):
        speed = member.gauges.get("tokens_per_second")
        table.add_row(
            *(member.member_id, *([_ROLES.get(member.role, "?")] if wide else []), member.address or "-"),
            serving_text(member, wide=wide),
            *("-" if speed is None else f"{speed:.0f}", f"{member.heartbeat_age_ms / 1000:.1f} s"),
            member.waiting_reason or "-",
            *([f"{member.endpoint}/v1" if member.endpoint else "-"] if endpoints else []),
        )
    return table


def serving_text(member: membership_pb2.Member, *, wide: bool) -> str:
    """The version that a member serves, in words or in short."""
    policy = member.serving
    if not policy.incarnation:
        return "-"
    return f"version {policy.version} (incarnation {policy.incarnation})" if wide else f"v{policy.version}"


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
