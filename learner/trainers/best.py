"""The best checkpoint of a training, by a metric of its evaluations; rank 0's work alone.

The file is that of a run (`learner.checkpoint.best`). A training knows the value before it writes the checkpoint. So it
writes one only where the value is better.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollmesh.learner.checkpoint.best import Best, BestCheckpoint
from rollmesh.learner.checkpoint.names import checkpoint_name
from rollmesh.mesh.config.trainers.sections import HeldOutSection
from rollmesh.mesh.trajectory.versions import PolicyVersion

log = logging.getLogger(__name__)
_EVAL = "eval/"


class BestByMetric:
    """Says which checkpoint is the best one.

    Args:
        root: folder of the checkpoints.
        incarnation: of this process's start; it takes the file over.
        section: names the metric.
        measured_by: values under another name cannot be compared.

    Raises:
        FencedError: another process has taken over.
        DataError: the file cannot be read.
    """

    def __init__(self, root: Path, incarnation: int, section: HeldOutSection, measured_by: str) -> None:
        self._file = BestCheckpoint(root, incarnation)
        self._section = section
        self._measured_by = measured_by
        self._best = self._file.claim()
        self._has_warned = False

    @property
    def name(self) -> str:
        """The best checkpoint so far; empty without one."""
        return self._best.checkpoint if self._best is not None else ""

    def better(self, version: PolicyVersion, record: Mapping[str, Any]) -> Best | None:
        """The checkpoint of a version as the best one; None where it is not better, or was not evaluated.

        Args:
            version: of the weights.
            record: of its step.
        """
        value = record.get(f"{_EVAL}{self._section.metric}")
        if value is None:
            self._warn(record)
            return None
        metric, better = self._section.metric, self._section.better
        found = Best(
            checkpoint_name(version), version.incarnation, version.version, metric, better, value, self._measured_by
        )
        return found if found.beats(self._best) else None

    def keep(self, found: Best) -> None:
        """Records the best one, which is there now.

        Raises:
            FencedError: another process has taken over.
        """
        if self._file.record_value(found):
            self._best = found
            log.info("step %d is the best so far: %s %.6g", found.version, found.metric, found.value)

    def _warn(self, record: Mapping[str, Any]) -> None:
        names = [name.removeprefix(_EVAL) for name in record if name.startswith(_EVAL)]
        if names and not self._has_warned:
            self._has_warned = True
            log.warning("no evaluation has %s, so none is the best: eval.metric may be %s", self._section.metric, names)
