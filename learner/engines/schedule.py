"""Learning-rate schedules: linear warm-up, then constant, linear or cosine to a floor, or a plateau that ends (WSD)."""

from __future__ import annotations

import math

from rollmesh.mesh.config.learner import OptimizerSection


def learning_rate(section: OptimizerSection, step: int, total_steps: int) -> float:
    """Rate of the optimizer step with this number.

    Args:
        section: peak rate, schedule, warm-up and floor.
        step: from 0.
        total_steps: steps of the whole run; afterwards the floor holds.
    """
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
