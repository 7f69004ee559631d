"""The generators of a run in few rows: those that wait come first, and of many the rest is summed up."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from rollmesh.launcher.console.members_table import serving_text, version_range
from rollmesh.launcher.console.text import shortened
from rollmesh.launcher.mesh_client import Snapshot
from rollmesh.protos import membership_pb2

# Rows of a live view; a mesh may have a thousand generators.
_MOST = 8
_FIXED_COLUMNS = 46
# The reason of a generator that has not found its learner yet, and the same while a learner loads.
_WITHOUT_LEARNER = "waits for a learner"
_LEARNER_LOADS = "waits for the learner, which is loading"


def generators_table(snapshot: Snapshot, columns: int) -> Table:
    """The generators as a table that fits.

    Args:
        snapshot: of now.
        columns: of the terminal.
    """
    generators = sorted(snapshot.generators(), key=lambda member: (not member.waiting_reason, member.member_id))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for title in ("generator", "serves", "tokens/s", "waits for"):
        table.add_column(title, no_wrap=True)
    for member in generators[:_MOST]:
        reason = _reason(member, snapshot) or "-"
        speed = member.gauges.get("tokens_per_second", 0.0)
        row = (shortened(member.member_id, 22), serving_text(member, wide=False), f"{speed:.0f}")
        table.add_row(*row, Text(shortened(reason, max(20, columns - _FIXED_COLUMNS))))
    if others := generators[_MOST:]:
        waiting = sum(bool(member.waiting_reason) for member in others)
        speed = sum(member.gauges.get("tokens_per_second", 0.0) for member in others)
        table.add_row(f"{len(others)} others", version_range(others), f"{speed:.0f}", f"{waiting} of them wait")
    return table


def _reason(member: membership_pb2.Member, snapshot: Snapshot) -> str:
    loading = member.waiting_reason == _WITHOUT_LEARNER and snapshot.learner_starts
    return _LEARNER_LOADS if loading else member.waiting_reason
