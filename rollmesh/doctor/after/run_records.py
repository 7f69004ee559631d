"""The records of a run folder, as the rules read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from rollmesh.launcher.folder import MESH
from rollmesh.mesh.config.models import Config
from rollmesh.report.memory import MemorySample, read_memory
from rollmesh.report.metrics import Record, is_evaluation, is_training, metric_value, read_metrics, run_records
from rollmesh.report.restarts import read_restarts
from rollmesh.report.stalls import Stall, read_stalls
from rollmesh.report.summary import Summary, read_summary
from rollmesh.report.turns import swap_times
from rollmesh.report.unscored import UnscoredMembers
from rollmesh.run_files import SNAPSHOTS, SUMMARY, is_in_use, read_config


@dataclass(frozen=True)
class RunRecords:
    """A run that has ended, or the part of one that is in progress.

    Attributes:
        config: of the run.
        records: of `metrics.jsonl`, those of the surviving lineage.
        snapshots: of `mesh.jsonl`.
        summary: written at the end; None for a run in progress, and without a launcher.
        cut_short: a launcher began the run, and has neither ended it nor left it in order.
        restarts: by service and reason.
        stalls: in the order of time.
        memory: of all services, over time.
    """

    config: Config
    records: Sequence[Record]
    snapshots: Sequence[Record] = ()
    summary: Summary | None = None
    cut_short: bool = False
    restarts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    stalls: Sequence[Stall] = ()
    memory: Sequence[MemorySample] = ()

    @classmethod
    def read(cls, folder: Path) -> RunRecords:
        """Reads a run folder.

        Raises:
            DataError: it is not the folder of `rollmesh run`, or its summary is damaged.
        """
        return cls(
            config=read_config(folder),
            records=run_records(folder),
            snapshots=read_metrics(folder / SNAPSHOTS),
            summary=read_summary(folder) if (folder / SUMMARY).exists() else None,
            cut_short=(folder / MESH).exists() and not is_in_use(folder),
            restarts=read_restarts(folder),
            stalls=read_stalls(folder),
            memory=read_memory(folder),
        )

    @cached_property
    def steps(self) -> list[Record]:
        """Training records, in the order of the steps."""
        return [record for record in self.records if is_training(record)]

    @cached_property
    def evaluations(self) -> list[Record]:
        """Records of evaluations, in the order of the steps."""
        return sorted(filter(is_evaluation, self.records), key=lambda record: int(record["step"]))

    @cached_property
    def unscored(self) -> UnscoredMembers:
        """Members of trained groups without a reward."""
        found = UnscoredMembers()
        found.add(self.steps)
        return found

    @cached_property
    def swaps(self) -> dict[str, float]:
        """Times and shares of swaps of shared devices; empty without any."""
        return swap_times(self.steps)

    def values(self, metric: str) -> list[float]:
        """A metric of the steps that have it, in their order."""
        return [value for step in self.steps if (value := metric_value(step, metric)) is not None]

    def recent(self, metric: str, of: Callable[[Sequence[float]], float], share: float = 0.5) -> float | None:
        """A statistic of a metric over the last steps; None without the metric.

        Args:
            metric: its name.
            of: the statistic, as `statistics.fmean`.
            share: of the steps that have it.
        """
        found = self.values(metric)
        return of(found[-max(1, round(share * len(found))) :]) if found else None

    def early(self, metric: str, of: Callable[[Sequence[float]], float], share: float = 0.2) -> float | None:
        """The same over the first steps."""
        found = self.values(metric)
        return of(found[: max(1, round(share * len(found)))]) if found else None

    def last(self, metric: str) -> float | None:
        """The last value of a metric in any record; None without it."""
        return next(
            (value for record in reversed(self.records) if (value := metric_value(record, metric)) is not None), None
        )
