"""Entropy bonus: keeps the policy from collapsing; its coefficient is fixed or follows a target entropy.

The loss subtracts coefficient * aggregate(H_t), with H_t the entropy of the next-token distribution in nats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rollmesh.learner.algorithms.settings import Settings, SettingsError


@dataclass(frozen=True)
class EntropySettings(Settings):
    """The entropy bonus.

    Attributes:
        coefficient: weight of the bonus (at start, with `target`); 0: none.
        target: mean entropy in nats that the coefficient adapts to; None: it stays.
        step: change of the adaptive coefficient per batch (Skywork-OR1: 0.005).
        min_coefficient, max_coefficient: range of the adaptive coefficient.
    """

    coefficient: float = 0.0
    target: float | None = None
    step: float = 0.005
    min_coefficient: float = 0.0
    max_coefficient: float = 1.0

    def __post_init__(self) -> None:
        if self.target is not None and self.target <= 0:
            raise SettingsError("target", "must be positive", hint="leave it out for a fixed coefficient")
        if self.step <= 0:
            raise SettingsError("step", "must be positive")
        if self.min_coefficient > self.max_coefficient:
            raise SettingsError("min_coefficient", "is over max_coefficient")

    @property
    def active(self) -> bool:
        """True where the loss needs the entropy's gradient."""
        return self.coefficient != 0 or self.target is not None


def next_entropy_coefficient(coefficient: float, entropy: float, settings: EntropySettings) -> float:
    """The adaptive coefficient after a batch: a step up below the target, a step down above it.

    Skywork-OR1, arXiv:2505.22312, sec. 4 (adaptive entropy control).

    Args:
        coefficient: before.
        entropy: mean over the batch's tokens, nats; one that is not finite changes nothing.
        settings: target, step and range.

    Returns:
        Within the range; unchanged without a target.
    """
    if settings.target is None or not math.isfinite(entropy) or entropy == settings.target:
        return coefficient
    step = settings.step if entropy < settings.target else -settings.step
    return min(max(coefficient + step, settings.min_coefficient), settings.max_coefficient)


def applied_entropy_coefficient(coefficient: float, entropy: float, settings: EntropySettings) -> float:
    """The coefficient that a batch's loss uses: with a target, 0 while the entropy is above it.

    Skywork-OR1, arXiv:2505.22312, sec. 4: the bonus works only where the entropy is at or below the target.

    Args:
        coefficient: as adapted so far.
        entropy: mean over the batch's tokens, nats.
        settings: the target.
    """
    return coefficient if settings.target is None or not entropy > settings.target else 0.0
