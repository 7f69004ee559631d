"""The age of a token when it is trained, across learners that took a run over.

A learner that resumes at version k discards the versions above k. A token of (incarnation, version) therefore lies on
the surviving lineage only up to the common ancestor m, the least k of all later incarnations. Beyond m its distance to
the present version `now` leads back to the ancestor and forth again: (version - m) + (now - m).
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

    resumed: tuple[tuple[int, int], ...] = ()

    @classmethod
    def from_wire(cls, wire: Sequence[Sequence[int]]) -> Lineage:
        """A lineage from [[incarnation, resume version], ...]."""
        return cls(tuple((int(incarnation), int(version)) for incarnation, version in wire))

    def to_wire(self) -> list[list[int]]:
        return [list(item) for item in self.resumed]

    @property
    def incarnation(self) -> int:
        """The present incarnation; 0 before the first."""
        return self.resumed[-1][0] if self.resumed else 0

    def with_takeover(self, incarnation: int, version: int) -> Lineage:
        """The lineage with one more incarnation, which continued from `version`."""
        return Lineage((*(item for item in self.resumed if item[0] < incarnation), (incarnation, version)))

    def is_ancestor(self, policy: PolicyVersion) -> bool:
        """True if the present weights descend from these: no later learner has discarded them."""
        return all(policy.version <= at for incarnation, at in self.resumed if incarnation > policy.incarnation)

    def effective(self, sampled: PolicyVersion) -> int:
        """The version of the present lineage that is as old as `sampled`; may be negative."""
        later = [version for incarnation, version in self.resumed if incarnation > sampled.incarnation]
        ancestor = min(later, default=sampled.version)
        return sampled.version if sampled.version <= ancestor else 2 * ancestor - sampled.version

    def staleness(self, sampled: PolicyVersion, now: int) -> int:
        """Versions between `sampled` and the training at version `now` of the present incarnation."""
        return now - self.effective(sampled)

    def per_token(self, versions: VersionRuns, now: int) -> NDArray[np.int32] | int:
        """Staleness of every token of a trajectory, int32 [T]; one int where all agree."""
        if len(versions.runs) == 1:
            return self.staleness(versions.runs[0][1], now)
        values = [self.staleness(version, now) for _, version in versions.runs]
        return np.repeat(np.array(values, dtype=np.int32), [length for length, _ in versions.runs])
