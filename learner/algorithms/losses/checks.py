"""Ranges of the losses' settings: a wrong one is refused by name at the first call."""

from __future__ import annotations

import math

from rollmesh.learner.algorithms.settings import SettingsError


def check_range(field: str, value: float, low: float, high: float = math.inf, *, open_low: bool = False) -> None:
    """Refuses a setting out of range.

    Args:
        field: name of the setting, without `loss.`.
        value: from the configuration.
        low, high: bounds, inclusive.
        open_low: `low` itself is refused too.

    Raises:
        SettingsError: where it is out of range.
    """
    if value < low or value > high or (open_low and value == low):
        above = f"> {low:g}" if open_low else f">= {low:g}"
        below = "" if math.isinf(high) else f" and <= {high:g}"
        raise SettingsError(f"loss.{field}", f"expected a value {above}{below}, got {value}")


def check_clip(clip_low: float, clip_high: float, dual_clip: float | None = None) -> None:
    """Refuses bounds of a ratio that contain no ratio, or not 1.

    Raises:
        SettingsError: where one is out of range.
    """
    check_range("clip_low", clip_low, 0.0, 1.0)
    check_range("clip_high", clip_high, 0.0)
    if dual_clip is not None:
        check_range("dual_clip", dual_clip, 1.0, open_low=True)
