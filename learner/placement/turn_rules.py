"""The decisions of turns: whether one may begin, and whether one continues with another batch. No I/O.

The gate lets (S + 1) B groups live at once, with S the bound on staleness and B the groups of a batch. A turn of k
batches begins when k B groups are sealed. Responses of the other groups may be unfinished: they continue after the
turn.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollmesh.mesh.config import Config


@dataclass(frozen=True, slots=True)
class TableView:
    """The table `train`, as the buffer last described it.

    Attributes:
        generating: groups that generators hold, or that wait for their rewards.
        ready: sealed groups that wait for the learner.
        leased: groups that the learner holds.
        evaluating: held-out prompts are to be answered by the version in force, or are being answered.
    """

    generating: int
    ready: int
    leased: int
    evaluating: bool = False


@dataclass(frozen=True, slots=True)
class TurnRules:
    """Sizes of turns.

    Attributes:
        batches: in one turn, at most.
        groups: per batch.
        last_version: the run ends with it.
    """

    batches: int
    groups: int
    last_version: int

    @classmethod
    def of(cls, config: Config) -> TurnRules:
        """The rules of a configuration."""
        batches = config.placement.batches_per_turn or max(1, config.buffer.max_staleness)
        return cls(batches, config.learner.batch.groups, config.learner.steps)

    def reason_to_wait(self, version: int, table: TableView) -> str:
        """The reason why no turn begins although a batch is held; empty where one may.

        Args:
            version: that the batch will train.
            table: see there.
        """
        if table.evaluating:
            return "the evaluation of the present version ends first"
        batches = min(self.batches, self.last_version - version)
        missing = batches * self.groups - table.ready - table.leased
        if missing > 0 and table.generating:
            return f"{missing} more groups are awaited for a turn of {batches} batches"
        return ""

    def continues(self, version: int, trained: int, table: TableView) -> bool:
        """True where a turn continues with a batch for `version`.

        Args:
            version: the next to be trained.
            trained: batches of this turn so far.
            table: see there.
        """
        if table.evaluating or version >= self.last_version or trained >= self.batches:
            return False
        return table.ready + table.leased >= self.groups
