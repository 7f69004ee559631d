"""The time of an end in order, divided into its steps."""

from __future__ import annotations

from dataclasses import dataclass

# Storing members, storing drafts, giving leases back.
_STORING_STEPS = 3
_STORING_S = 5.0
_LEAVING_S = 3.0


@dataclass(frozen=True, slots=True)
class DrainTimes:
    """Bounds of the steps by which a generator ends, in seconds; each step ends as soon as it is done.

    Attributes:
        running_s: for which running responses continue; what finishes until then needs no other generator.
        storing_s: each of the three steps after that: finished members are stored, the rest is drafted, leases are
            given back.
    """

    running_s: float = 5.0
    storing_s: float = _STORING_S

    @classmethod
    def within(cls, total_s: float) -> DrainTimes:
        """The bounds that end a generator in time: storing gets its usual time, at most a fifth for each step.

        Args:
            total_s: until the process is gone. A tenth of it, at most 3 s, is for leaving the mesh.
        """
        storing_s = min(_STORING_S, total_s / 5)
        leaving_s = min(_LEAVING_S, total_s / 10)
        return cls(max(0.0, total_s - _STORING_STEPS * storing_s - leaving_s), storing_s)


USUAL = DrainTimes()
"""If it is not said how long an end may take."""
