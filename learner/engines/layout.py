"""The place of a process in a model that may be divided over several processes.

A *data-parallel rank* computes its own share of a batch. It is one process, or several that compute a share together
(tensor, pipeline, context, expert or sequence parallel). The division of the parameters is another one: FSDP divides a
copy of them over many data-parallel ranks (`learner.parallel.shards`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """The place of this process. Engines of several roles may have different ones, over the same processes.

    Attributes:
        dp_rank: of this process, 0 .. dp_size - 1: names its share of a batch.
        sources: by data-parallel rank, the process in which its results arise. It is of the last pipeline stage, and
            the first of its model-parallel group.
        process, processes: this process among all of the learner's: for the names of files and in messages.
    """

    dp_rank: int = 0
    sources: tuple[int, ...] = (0,)
    process: int = 0
    processes: int = 1

    @classmethod
    def of_neighbours(cls, process: int, processes: int, width: int = 1) -> Layout:
        """Every process computes whole layers, gathered as by FSDP or its own; neighbours compute one share together.

        Args:
            process: this one.
            processes: their number.
            width: processes that compute a share; divides their number.
        """
        return cls(process // width, tuple(range(0, processes, width)), process, processes)

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks: the shares into which a batch is divided."""
        return len(self.sources)

    @property
    def has_results(self) -> bool:
        """Log-probs, values, losses and metrics of its share arise in this process."""
        return self.sources[self.dp_rank] == self.process

    @property
    def leads(self) -> bool:
        """True in exactly one process: it talks to the mesh and writes the files that processes share."""
        return self.process == 0
