"""The state of the mesh at a moment, read from Redis without the product's code; and waiting for the right one.

A fault strikes hardest while the learner holds a part of a batch, or while an evaluation round runs. Such a moment may
not come (the batch is gathered at once, the round has ended). Then the fault is put on the mesh at any time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, cast

import redis

Moment = Literal["any", "partial", "round"]
STATES = ("generating", "ready", "leased", "consumed")
_PATIENCE_S = 3.0
_POLL_S = 0.01


class Moments:
    """Looks into Redis.

    Args:
        connect: opens a connection.
        batch: groups per batch.
    """

    def __init__(self, connect: Callable[[], redis.Redis], batch: int) -> None:
        self._connect = connect
        self._batch = batch

    def counts(self, table: str = "train") -> dict[str, int]:
        """Groups in each state, and prompt tasks that wait; empty while Redis does not answer."""
        prefix = f"{{rollmesh:run}}:{table}"
        try:
            with self._connect() as client, client.pipeline(transaction=False) as pipe:
                for state in STATES:
                    pipe.zcard(f"{prefix}:{state}")
                pipe.zcard(f"{prefix}:pending:")
                return dict(zip((*STATES, "pending"), cast("list[int]", pipe.execute()), strict=True))
        except redis.exceptions.RedisError:
            return {}

    def held(self) -> int:
        """Groups that the learner has leased and not claimed."""
        return self.counts().get("leased", 0)

    def wait(self, moment: Moment) -> None:
        """Until it has come, or for a few seconds."""
        until = time.monotonic() + _PATIENCE_S
        while not self._is(moment) and time.monotonic() < until:
            time.sleep(_POLL_S)

    def _is(self, moment: Moment) -> bool:
        match moment:
            case "partial":
                return 0 < self.held() < self._batch
            case "round":
                counts = self.counts("eval")
                return any(counts.get(state) for state in ("generating", "ready", "leased"))
            case "any":
                return True
