"""Learning-rate schedules: linear warm-up, then constant, linear or cosine to a floor, or a plateau that ends (WSD)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rollmesh.mesh.config.learner import OptimizerSection


@dataclass(frozen=True, slots=True)
class RunStep:
    """A step of a run, as the schedule of one role counts them. All optimizer steps that it has get one rate.

    Attributes:
        number: from 0.
        total: steps of the whole run, as far as its end is known; afterwards the floor holds.
    """

    number: int
    total: int

    @classmethod
    def of(cls, version: int, end: int, *, begins_at: int = 0) -> RunStep:
        """The step of a role that trains the version.

        Args:
            version: trained one.
            end: last version of the run, as far as is known.
            begins_at: the first version that the role trains.
        """
        return cls(max(0, version - begins_at), max(0, end - begins_at))


def learning_rate(section: OptimizerSection, at: RunStep) -> float:
    """Rate of the optimizer steps of a run's step.

    Args:
        section: peak rate, schedule, warm-up and floor.
        at: the step.
    """
    step, total_steps = at.number, at.total
    warmup = section.warmup_steps or round(section.warmup_ratio * total_steps)
    if step < warmup:
        return section.lr * (step + 1) / warmup
    if section.schedule == "constant":
        return section.lr
    begin = warmup
    if section.schedule == "wsd":
        begin = max(warmup, total_steps - math.ceil(section.decay_ratio * total_steps))
    progress = min(1.0, max(0, step - begin) / max(1, total_steps - begin))
    share = 0.5 * (1.0 + math.cos(math.pi * progress)) if section.schedule == "cosine" else 1.0 - progress
    return section.lr * (section.min_lr_ratio + (1.0 - section.min_lr_ratio) * share)
