"""Notices of settings that can have no effect in a run, from settings and plan alone; shown at start.

The ratio of a loss compares the current policy with the one that anchors it. Where the anchor is the current policy
itself, the ratio is 1 and everything that bounds it is idle. So it is with one optimizer step per batch and a proximal
policy, which is then the policy before that very step. The importance weight alone corrects for staleness there.

Invariant: a setting that is named here changes no gradient of the run; `python -m benchmarks.learner.clips` shows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollmesh.learner.algorithms.correction.settings import CorrectionSettings
from rollmesh.learner.algorithms.types import UpdatePlan


def ratio_is_one(correction: CorrectionSettings, plan: UpdatePlan) -> bool:
    """True where the policy that anchors the losses is the one that is being optimized, in every optimizer step."""
    return plan.updates == 1 and correction.mode != "behaviour" and correction.proximal == "recompute"


def idle_loss_settings(on_ratio: Sequence[str], settings: Mapping[str, Any]) -> str:
    """A sentence for settings of a loss that are in use and bound a ratio of 1; empty without any.

    Args:
        on_ratio: see `LossTraits`.
        settings: of the loss, defaults included.
    """
    idle = [f"algorithm.loss.{name}" for name in on_ratio if settings[name] is not None]
    if not idle:
        return ""
    return (
        f"without effect: {', '.join(idle)}. With one optimizer step per batch the loss's ratio to the proximal policy "
        "is 1; set learner.batch.minibatches above 1, or algorithm.correction.mode: behaviour"
    )


def idle_value_clip(clip: float | None, plan: UpdatePlan) -> str:
    """A sentence for a critic's clip that bounds no distance; empty where it bounds one, and without a clip."""
    if clip is None or plan.updates > 1:
        return ""
    return (
        "without effect: algorithm.value.clip. With one optimizer step per batch the critic's values are still those "
        "from before it; set learner.batch.minibatches above 1"
    )
