"""The place of a process in a model that may be divided over several processes.

A *replica* is one whole copy of the model. Data-parallel ranks are replicas: each computes its own share of a batch.
The processes of a replica hold parts of it (tensor, pipeline, context or expert parallel) and compute the same share.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """The place of this process. Engines of several roles may have different ones, over the same processes.

    Attributes:
        dp_rank: of this process's replica, 0 .. dp_size - 1: names its share of a batch.
        sources: by data-parallel rank, the process in which the replica's results arise. It is of the last pipeline
            stage, and the first of its model-parallel group.
        process, processes: this process among all of the learner's: for the names of files and in messages.
    """

    dp_rank: int = 0
    sources: tuple[int, ...] = (0,)
    process: int = 0
    processes: int = 1

    @classmethod
    def of_replicas(cls, process: int, processes: int, width: int = 1) -> Layout:
        """Every process holds the model, whole or sharded as by FSDP; neighbours compute one share together.

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
        """It talks to the mesh and writes the files that processes share; true in exactly one process."""
        return self.process == 0
