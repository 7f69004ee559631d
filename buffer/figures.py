"""A front's Prometheus figures: groups by state and fate, waiting clocks, bytes, versions.

They are the table's, the same at every front; scraping one of several fronts is enough.
"""

from __future__ import annotations

import asyncio
import time

from buffer.context import FrontContext
from buffer.ledger import describe
from buffer.policy.rules import TABLES
from buffer.redis_access import RedisAccess
from mesh.errors import StoreError
from mesh.metrics import GaugeBoard
from protos import buffer_pb2 as pb

_INTERVAL_S = 2.0
_COUNTS = [field.name for field in pb.LedgerCounts.DESCRIPTOR.fields if field.name != "reasons"]


async def report(front: FrontContext, access: RedisAccess, board: GaugeBoard) -> None:
    """Refreshes the figures again and again."""
    while True:
        for table in TABLES:
            try:
                described = await describe(front, access, table, now_s=time.time())
            except StoreError:  # the sweep says so; the figures stay as they were
                continue
            board.set({f"{table}_{name}": value for name, value in figures_of(described).items()})
        await asyncio.sleep(_INTERVAL_S)


def figures_of(described: pb.DescribeResponse) -> dict[str, float]:
    """A table's figures by name."""
    figures = {name: float(getattr(described.counts, name)) for name in _COUNTS}
    figures |= {f"ended_{reason}": float(count) for reason, count in described.counts.reasons.items()}
    return figures | {
        "policy_version": float(described.policy.version),
        "policy_incarnation": float(described.policy.incarnation),
        "committed_version": float(described.committed_version),
        "payload_bytes": float(described.bytes),
        "waiting_for_inserts_seconds": described.waiting_for_inserts_ms / 1e3,
        "waiting_for_samples_seconds": described.waiting_for_samples_ms / 1e3,
    }
