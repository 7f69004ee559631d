"""The rules of a table: everything the contract depends on, read from the configuration once."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from rollmesh.buffer.protocol.limits import group_bytes
from rollmesh.mesh.config import Config
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.tables import TRAIN

# Deadline of groups in a table without a staleness bound; larger than any version.
NO_BOUND = 10_000_000_000_000


class Order(IntEnum):
    """Ranking of ready groups; the scripts know it by number.

    IN_ORDER: by admission, waiting for stragglers rather than dropping them. FIFO: by sealing. FRESHEST: newest tokens
    first. PRIORITY: drawn in proportion to weights. SCORE: by a user's function, highest first.
    """

    IN_ORDER = 0
    FIFO = 1
    FRESHEST = 2
    PRIORITY = 3
    SCORE = 4


@dataclass(frozen=True, slots=True)
class TableRules:
    """Rules of one table.

    Attributes:
        groups_per_step: groups in a batch (B).
        max_staleness: versions by which a trained token may be older than the learner (S).
        bounded: whether gate and bound apply (`train`), or tasks are pinned instead (`eval`).
        order: how ready groups are ranked.
        max_reuse: uses of a group at most (R), one per version.
        samples_per_insert: uses per group that the gate counts on.
        seed: of weighted draws.
        min_members: scored members below which a sealed group fails.
        lease_ms, grace_ms: lease term, and what is left of it when a stream breaks, in milliseconds.
        max_bytes: payload bytes (stored and reserved) above which nothing is admitted.
        failed_kept: failed groups noted with their cause and their prompt.
        max_attempts: lost holders after which a group fails, and refills after which an evicted prompt is given up.
    """

    groups_per_step: int
    max_staleness: int
    bounded: bool = True
    order: Order = Order.IN_ORDER
    max_reuse: int = 1
    samples_per_insert: int = 1
    seed: int = 0
    min_members: int = 2
    lease_ms: int = 15_000
    grace_ms: int = 3_000
    max_bytes: int = 1 << 30
    max_attempts: int = 4
    failed_kept: int = 1000

    @property
    def waits_for_evaluation(self) -> bool:
        """Whether nothing is admitted during an evaluation."""
        return self.bounded and self.max_staleness == 0

    def to_fields(self) -> dict[str, int]:
        """The rules as the scripts read them."""
        return {name: int(getattr(self, name)) for name in self.__slots__}


def order_of(name: str) -> Order:
    """The order that `buffer.order` names; a path of the form `module:function` or `file.py:function` is a score."""
    return Order.SCORE if ":" in name else Order[name.upper()]


def rules_of(config: Config, table: str) -> TableRules:
    """The rules that a configuration means for `train` or `eval`.

    Raises:
        ConfigError: the byte budget cannot hold one batch: nothing would ever train.
    """
    _check_budget(config)
    train = table == TRAIN
    max_reuse = config.buffer.max_reuse if train else 1
    return TableRules(
        groups_per_step=config.learner.batch.groups,
        max_staleness=config.buffer.max_staleness,
        bounded=train,
        order=order_of(config.buffer.order) if train else Order.FIFO,
        max_reuse=max_reuse,
        samples_per_insert=(config.buffer.samples_per_insert or max_reuse) if train else 1,
        seed=config.run.seed,
        min_members=config.buffer.min_members if train else 1,
        lease_ms=round(config.buffer.lease_s * 1000),
        grace_ms=round(config.buffer.reconnect_grace_s * 1000),
        max_bytes=config.buffer.max_bytes,
        max_attempts=config.rollout.max_attempts,
    )


def _check_budget(config: Config) -> None:
    groups, rollout, budget = config.learner.batch.groups, config.rollout, config.buffer.max_bytes
    _, members = config.group_sizes
    needed = groups * group_bytes(members, rollout.longest_response)
    if needed > budget:
        raise ConfigError(
            f"buffer.max_bytes ({budget}) cannot hold one batch: {groups} groups of {members} responses of "
            f"{rollout.longest_response} tokens may need {needed} bytes",
            hint=f"set buffer.max_bytes to {2 * needed} or more",
        )
