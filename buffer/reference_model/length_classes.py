"""Classes of response lengths: eviction strikes the long ones first, and figures by class show it."""

from __future__ import annotations


def length_class(tokens: int) -> int:
    """The least power of two that is not below `tokens`; 1 for none."""
    return 1 << max(0, tokens - 1).bit_length()
