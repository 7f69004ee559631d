"""Groups that are trained more than once: which uses count, and what they demand of the gate.

A group may be claimed up to R times, at most once per version, each time under a lease of its own. Its uses are the
train versions of its claims on the surviving lineage. While it may be used again it is ready like any other; after its
last use it is consumed. A group that has been used ends as trained, whatever ends it.

Rate: every unclaimed group demands `samples_per_insert` uses less those it has had. With R = 1 the demand is the number
of unclaimed groups, and the gate is the plain one.
"""

from __future__ import annotations

from collections.abc import Sequence


def kept_uses(uses: Sequence[int], resumed_at: int) -> list[int]:
    """The uses that a learner resuming at a version finds in its weights."""
    return [version for version in uses if version < resumed_at]


def may_be_used_again(uses: Sequence[int], deadline: int, max_reuse: int) -> bool:
    """True if a group just claimed can train at a later version, too."""
    return len(uses) < max_reuse and deadline > uses[-1]


def spent(uses: Sequence[int], samples_per_insert: int) -> int:
    """Uses that an unclaimed group does not demand any more."""
    return min(len(uses), samples_per_insert)
