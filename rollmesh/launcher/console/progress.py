"""The way that a run has gone, and the time that the rest will take."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from rollmesh.mesh.config.models import Config
from rollmesh.report.branches import Branches
from rollmesh.report.equal_rewards import HIGHEST, LOWEST, REMEDY, equal_rewards
from rollmesh.report.metrics import REWARD, Record, is_evaluation, is_training, metric_value

# Steps over which speed and reward are averaged.
_RECENT = 20


class Progress:
    """Follows the records of a run.

    Args:
        steps: of the run, after which it ends at the latest; None: not known.

    Attributes:
        step: the last one that was trained; 0 before the first.
        steps: as above.
        held_out: held-out rewards, by step.
    """

    def __init__(self, steps: int | None = None) -> None:
        self.step = 0
        self.steps = steps
        self.held_out: dict[int, float] = {}
        self._recent: deque[Record] = deque(maxlen=_RECENT + 1)

    @classmethod
    def of_run(cls, config: Config) -> Progress:
        """Follows the run of a configuration."""
        return cls(config.learner.steps)

    def add(self, records: Sequence[Record]) -> None:
        """Takes new records; a step that a resumed learner trains again replaces the former one."""
        for record in records:
            if is_training(record):
                if int(record["step"]) <= self.step:
                    self._recent.clear()
                self.step = int(record["step"])
                self._recent.append(record)
            elif is_evaluation(record) and (reward := metric_value(record, "eval/reward")) is not None:
                self.held_out[int(record["step"])] = reward

    @property
    def reward(self) -> float | None:
        """Mean training reward of recent steps; None before the first."""
        found = self._latest(REWARD)
        return statistics.fmean(found) if found else None

    @property
    def advice(self) -> str:
        """The remedy where recent steps have all had one reward; empty where they differ, and before there are many."""
        if len(self._recent) < _RECENT:
            return ""
        same = equal_rewards(self._latest(LOWEST), self._latest(HIGHEST), f"the last {_RECENT} steps")
        return f"{same}. {REMEDY}" if same else ""

    @property
    def branches(self) -> str:
        """The share of turns of recent steps that are not trained, and why; empty where there are few."""
        return Branches.of(self._recent).warning

    @property
    def seconds_per_step(self) -> float | None:
        """The time of recent steps, waiting included; None before there are two."""
        if len(self._recent) < 2:
            return None
        first, last = self._recent[0], self._recent[-1]
        return (float(last["time"]) - float(first["time"])) / (len(self._recent) - 1)

    @property
    def left_s(self) -> float | None:
        """Seconds to the last step, at the present speed; None where the speed or the last step is not known."""
        speed = self.seconds_per_step
        return None if speed is None or self.steps is None else max(0, self.steps - self.step) * speed

    def _latest(self, metric: str) -> list[float]:
        """A metric of recent steps, as far as they have it."""
        found = [value for record in self._recent if (value := metric_value(record, metric)) is not None]
        return found[-_RECENT:]

    def of_steps(self, step: int) -> str:
        """A step among all of them, in words."""
        return f"step {step}" if self.steps is None or step > self.steps else f"step {step} of {self.steps}"
