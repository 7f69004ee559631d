"""The interface of trackers: the destinations of a run's records and of its kept samples.

A record is flat: metric name -> value, names with slashes (`critic/score/mean`). Values that are no numbers
(histograms as maps, texts) are kept by the jsonl file and left out by trackers that draw curves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
Sample = Mapping[str, Any]
"""A kept response as `samples.jsonl` has it; see `learner.metrics.sample_log`."""


class Tracker(ABC):
    """Takes records and samples; called from one thread only."""

    @abstractmethod
    def log(self, step: int, record: Record) -> None:
        """Takes one record.

        Args:
            step: optimizer batches trained when it was made; not decreasing, may repeat. After a restart of the
                learner it begins at the last checkpoint again.
            record: metric name -> value.
        """

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:  # noqa: B027 - by choice
        """Takes kept samples of a step; a tracker without tables leaves them out."""

    def close(self) -> None:  # noqa: B027 - not every tracker holds something
        """Flushes and releases everything."""


def numbers(record: Record) -> dict[str, float]:
    """The values of a record that make curves."""
    return {
        name: float(value)
        for name, value in record.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
