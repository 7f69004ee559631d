"""Learning-rate schedules: linear warm-up, then constant, linear or cosine to a floor."""

from __future__ import annotations

import math

from rollmesh.mesh.config.learner import OptimizerSection


def learning_rate(section: OptimizerSection, step: int, total_steps: int) -> float:
    """Rate of the optimizer step with this number.

    Args:
        section: peak rate, schedule, warm-up steps and floor.
        step: from 0.
        total_steps: steps of the whole run; afterwards the floor holds.
    """
    if step < section.warmup_steps:
        return section.lr * (step + 1) / section.warmup_steps
    if section.schedule == "constant":
        return section.lr
    span = max(1, total_steps - section.warmup_steps)
    progress = min(1.0, (step - section.warmup_steps) / span)
    share = 1.0 - progress if section.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return section.lr * (section.min_lr_ratio + (1.0 - section.min_lr_ratio) * share)
