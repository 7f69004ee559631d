"""The rules of a table: everything the contract depends on, read from the configuration once."""

from __future__ import annotations

from dataclasses import dataclass

from mesh.config import Config

TRAIN = "train"
EVAL = "eval"
TABLES = (TRAIN, EVAL)
# Deadline of groups in a table without a staleness bound; larger than any version.
NO_BOUND = 10_000_000_000_000


@dataclass(frozen=True, slots=True)
class TableRules:
    """Rules of one table.

    Attributes:
        groups_per_step: groups in a batch (B).
        max_staleness: versions by which a trained token may be older than the learner (S).
        bounded: whether gate and bound apply (`train`), or tasks are pinned instead (`eval`).
        fifo: sample by sealing time rather than by admission.
        min_members: scored members below which a sealed group fails.
        lease_ms, grace_ms: lease term, and what is left of it when a stream breaks, in milliseconds.
        max_bytes: payload bytes (stored and reserved) above which nothing is admitted.
        max_attempts: lost holders after which a group fails, and refills after which an evicted prompt is given up.
    """

    groups_per_step: int
    max_staleness: int
    bounded: bool = True
    fifo: bool = False
    min_members: int = 2
    lease_ms: int = 15_000
    grace_ms: int = 3_000
    max_bytes: int = 1 << 30
    max_attempts: int = 4

    def to_fields(self) -> dict[str, int]:
        """As the Lua verbs read them."""
        return {name: int(getattr(self, name)) for name in self.__slots__}


def rules_of(config: Config, table: str) -> TableRules:
    """The rules that a configuration means for `train` or `eval`."""
    train = table == TRAIN
    return TableRules(
        groups_per_step=config.learner.batch.groups,
        max_staleness=config.buffer.max_staleness,
        bounded=train,
        fifo=not train or config.buffer.order == "fifo",
        min_members=config.buffer.min_members if train else 1,
        lease_ms=round(config.buffer.lease_s * 1000),
        grace_ms=round(config.buffer.reconnect_grace_s * 1000),
        max_bytes=config.buffer.max_bytes,
        max_attempts=config.rollout.max_attempts,
    )
