"""Capacity of a generator: the members in progress, and the groups that may be requested beyond them.

The bound is that of `generators.rollout.credits`, lower where the engine is overloaded (`ConcurrencyController`), and
one group at a time while all groups fail (`CircuitBreaker`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

from rollmesh.generators.engines.types import EngineStatus
from rollmesh.generators.rollout.circuit_breaker import CircuitBreaker
from rollmesh.generators.rollout.concurrency import ConcurrencyController, LoadSample
from rollmesh.generators.rollout.credits import InFlight, credits_for
from rollmesh.mesh.tables import TRAIN

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CapacitySettings:
    """The amount of sequences that are sampled at once.

    Attributes:
        slots: sequences that the responder decodes together.
        n_by_table: members per group, for credits; what is granted corrects it (greedy baselines come on top).
        share: see `credits_for`; for training alone.
        adaptive: fewer than `slots` sequences in flight where `observe` finds that they are too many.
    """

    slots: int
    n_by_table: Mapping[str, int]
    share: int
    adaptive: bool = False


class Capacity:
    """The members in progress by table, and the room for more.

    Attributes:
        closed: no more groups are wanted.
        asleep: no group is wanted for now: others have the devices.
    """

    def __init__(self, settings: CapacitySettings) -> None:
        self._settings = settings
        self._n_by_table = dict(settings.n_by_table)
        self._concurrency = (
            ConcurrencyController(settings.slots, self._n_by_table[TRAIN]) if settings.adaptive else None
        )
        self._breaker = CircuitBreaker()
        self._generating = dict.fromkeys(self._n_by_table, 0)
        self._undelivered = 0
        self.closed = self.asleep = False

    @property
    def load(self) -> InFlight:
        """Members in progress."""
        return InFlight(generating=sum(self._generating.values()), undelivered=self._undelivered)

    @property
    def limit(self) -> int:
        """Sequences that the engine is given at once, without the queue ahead of a full one."""
        return self._settings.slots if self._concurrency is None else self._concurrency.limit

    def outstanding(self, table: str) -> int:
        """Groups of `table` that still occupy the engine: members being sampled over members per group."""
        return -(-self._generating[table] // self._n_by_table[table])

    def credits(self, table: str) -> int:
        """Groups of `table` that may be granted now."""
        if self.closed or self.asleep:
            return 0
        load, n = self.load, self._n_by_table[table]
        share: int | None = self._settings.share
        at_work = load.generating > 0
        if table != TRAIN:
            # Evaluation does not compete with training for credits: its groups are few.
            load, share = InFlight(generating=self._generating[table], undelivered=load.undelivered), None
        allowed = credits_for(load, slots=self._settings.slots, n=n, share=share, limit=self.limit)
        return self._breaker.limit_credits(allowed, time.monotonic(), at_work=at_work)

    @property
    def waiting_reason(self) -> str:
        """The reason why fewer groups are requested than there is room for."""
        return self._breaker.waiting_reason

    def set_group_size(self, table: str, n: int) -> None:
        """Records the members per group of `table`, as granted."""
        self._n_by_table[table] = n

    def add_generating(self, table: str, members: int) -> None:
        """Counts members that the engine was given; a negative number of them once they are finished or withdrawn."""
        self._generating[table] += members

    def add_undelivered(self, members: int) -> None:
        """Counts members with an outcome to be stored; negative once it is stored, or no longer needed."""
        self._undelivered += members

    def record_answer(self) -> None:
        """Records that a member was answered: groups are requested as the load allows."""
        self._breaker.record_success()

    def record_failure(self, reason: str) -> float:
        """Records that all of a group has failed; returns the seconds until the next may be requested."""
        return self._breaker.record_failure(time.monotonic(), reason)

    def observe(self, status: EngineStatus, at: float) -> bool:
        """Adapts the limit to the engine's load.

        Args:
            at: time of the status, in seconds of a monotonic clock.

        Returns:
            True if the limit has changed.
        """
        # Without weights requests do not wait for room.
        if self._concurrency is None or status.state != "running" or status.serving is None:
            return False
        before, generating = self._concurrency.limit, self.load.generating
        sample = LoadSample(at, generating, status.active, status.queued, status.kv_usage, status.preemptions)
        limit = self._concurrency.observe(sample)
        if limit < before:
            log.info("at most %d sequences in flight instead of %d: %s", limit, before, self._concurrency.reason)
        return limit != before
