"""One cell of a benchmark: what is stored, by how many writers, and how it is timed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plan:
    """One measured run.

    Attributes:
        tokens: response tokens of a trajectory.
        writers: writer processes.
        group: trajectories of a group.
        seconds: measured time.
        warmup: seconds before it.
        rate: trajectories/s of all writers together; 0: as fast as they can.
        durability: of the buffer's Redis: `none`, `everysec`, `always`.
        batch: trajectories that the learner claims together.
        ahead: batches that are seeded ahead of the claim (bounds what the buffer holds).
        commit_every: claims per commit.
        fill: the learner begins only when all that is seeded ahead is ready, so that the table stays that full.
        checked: the mesh has a token: every call proves its caller.
    """

    tokens: int
    writers: int = 1
    group: int = 1
    seconds: float = 2.0
    warmup: float = 0.7
    rate: float = 0.0
    durability: str = "none"
    batch: int = 512
    ahead: int = 6
    commit_every: int = 4
    fill: bool = False
    checked: bool = False

    @property
    def groups_per_step(self) -> int:
        """B."""
        return max(1, self.batch // self.group)

    @property
    def name(self) -> str:
        """Names the cell in results."""
        pace = f"/paced{self.rate:g}" if self.rate else ""
        return f"T{self.tokens}/w{self.writers}/g{self.group}/{self.durability}{pace}"
