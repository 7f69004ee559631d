"""The interface of scoring, in this process or in another service."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from rollmesh.protos import reward_pb2


class RewardScorer(Protocol):
    """Scores items, here or elsewhere."""

    async def start(self) -> None:
        """Loads what scores here, so that the first items need not wait for it.

        Raises:
            RewardError: a function that cannot be loaded.
        """
        ...

    async def score(
        self, items: Sequence[reward_pb2.ScoreItem], *, timeout_s: float | None = None
    ) -> list[reward_pb2.ScoreResult]:
        """One result per item, in order.

        Args:
            items: unique item_ids; a group's items are kept together where they are given together.
            timeout_s: seconds for an item, with retries and failover, without the wait for its turn; none:
                the scorer's default.

        Raises:
            PayloadError: two items with the same item_id.
        """
        ...

    def set_endpoints(self, endpoints: Iterable[str]) -> None:
        """Changes the default endpoints, `grpc://host:port` or `host:port`."""
        ...

    def waiting_reason(self) -> str:
        """Why items wait at present; empty while scoring works."""
        ...

    async def close(self) -> None:
        """Ends what is in flight."""
        ...
