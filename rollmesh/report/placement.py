"""The placement of a run in words: its mode, and the reasons for which `placement: auto` has chosen it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def placement_lines(placement: Mapping[str, Any]) -> Iterator[str]:
    """The placement, and what `auto` has measured, estimated and left out.

    Args:
        placement: see `Summary`.
    """
    mode, asked = placement.get("mode", ""), placement.get("asked", "")
    if not mode:
        return
    yield mode if asked in ("", mode) else f"{mode} (asked for: {asked})"
    if text := placement.get("text"):
        yield text
    if estimates := placement.get("estimates"):
        yield "estimated seconds per batch: " + ", ".join(map(_estimated, estimates))
    if left_out := placement.get("left_out"):
        yield f"not possible: {', '.join(left_out)}"


def _estimated(estimate: Mapping[str, Any]) -> str:
    low, high = estimate["low_s"], estimate["high_s"]
    return f"{estimate['placement']} {f'{low:.3g} or more' if high is None else f'{low:.3g} to {high:.3g}'}"
