"""The age of a token when it is trained, across learners that took a run over.

A learner that resumes at version k discards the versions above k. A token of such a version counts the way through
the common ancestor: up from it to the token, and up from it to now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollmesh.mesh.trajectory.versions import PolicyVersion, VersionRuns


@dataclass(frozen=True, slots=True)
class Lineage:
    """The known incarnations and the versions from which they continued.

    Attributes:
        resumed: (incarnation, resume version), in increasing order of incarnations; the last is the present one.
    """

    resumed: tuple[tuple[int, int], ...]

    @classmethod
    def from_wire(cls, wire: Sequence[Sequence[int]]) -> Lineage:
        """From [[incarnation, resume version], ...]."""
        return cls(tuple((int(incarnation), int(version)) for incarnation, version in wire))

    def to_wire(self) -> list[list[int]]:
        return [list(item) for item in self.resumed]

    def with_takeover(self, incarnation: int, version: int) -> Lineage:
        """The lineage with one more incarnation, which continued from `version`."""
        return Lineage((*(item for item in self.resumed if item[0] < incarnation), (incarnation, version)))

    def is_ancestor(self, policy: PolicyVersion) -> bool:
        """Whether the present weights descend from these: no later learner has discarded them."""
        return all(policy.version <= at for incarnation, at in self.resumed if incarnation > policy.incarnation)

    def staleness(self, sampled: PolicyVersion, now: int) -> int:
        """Versions between `sampled` and the training at version `now` of the present incarnation."""
        later = [version for incarnation, version in self.resumed if incarnation > sampled.incarnation]
        ancestor = min(later, default=sampled.version)
        if sampled.version <= ancestor:
            return now - sampled.version
        return (sampled.version - ancestor) + (now - ancestor)

    def per_token(self, versions: VersionRuns, now: int) -> NDArray[np.int32] | int:
        """Staleness of every token of a trajectory, int32 [T]; one int where all agree."""
        if len(versions.runs) == 1:
            return self.staleness(versions.runs[0][1], now)
        values = [self.staleness(version, now) for _, version in versions.runs]
        return np.repeat(np.array(values, dtype=np.int32), [length for length, _ in versions.runs])
