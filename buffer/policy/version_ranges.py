"""The age of a token when learners have been replaced.

Each incarnation i > 1 resumed at a version k_i and discarded what its predecessors had published beyond. A token of
(incarnation, version) therefore lies on the surviving lineage only up to the common ancestor m, the least k_j of all
later incarnations. Beyond m its distance to the present version `now` leads back to the ancestor and forth again:
(version - m) + (now - m). `effective` is the version on the present lineage at that same distance.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rollmesh.mesh.trajectory.versions import PolicyVersion


@dataclass(frozen=True, slots=True)
class Lineage:
    """The incarnations so far: `resumed_at[i]` is the version from which incarnation i started."""

    incarnation: int
    resumed_at: Mapping[int, int]

    def effective(self, version: PolicyVersion) -> int:
        """The version of the present lineage that is as old as `version`; may be negative."""
        later = range(version.incarnation + 1, self.incarnation + 1)
        ancestor = min((self.resumed_at[i] for i in later), default=None)
        if ancestor is None or version.version <= ancestor:
            return version.version
        return 2 * ancestor - version.version


class VersionRanges:
    """Lowest and highest version per incarnation among a group's tokens.

    `effective` is not monotonic in the version, but on each incarnation its least value is at one of the two ends;
    so the ends are enough to find the oldest token under any later lineage.
    """

    def __init__(self, text: str = "") -> None:
        self._ranges: dict[int, tuple[int, int]] = {}
        for part in filter(None, text.split(";")):
            incarnation, low, high = map(int, part.split(":"))
            self._ranges[incarnation] = (low, high)

    @classmethod
    def of(cls, versions: Iterable[PolicyVersion]) -> VersionRanges:
        ranges = cls()
        for version in versions:
            ranges._include(version.incarnation, version.version, version.version)
        return ranges

    def _include(self, incarnation: int, low: int, high: int) -> None:
        known = self._ranges.get(incarnation, (low, high))
        self._ranges[incarnation] = (min(low, known[0]), max(high, known[1]))

    def merged(self, other: VersionRanges) -> VersionRanges:
        result = VersionRanges(str(self))
        for incarnation, (low, high) in other._ranges.items():
            result._include(incarnation, low, high)
        return result

    def oldest(self, lineage: Lineage) -> int | None:
        """Least effective version; None when empty."""
        ends = (
            lineage.effective(PolicyVersion(incarnation, version))
            for incarnation, pair in self._ranges.items()
            for version in pair
        )
        return min(ends, default=None)

    def __str__(self) -> str:
        """`incarnation:lowest:highest` joined by `;`, by incarnation."""
        return ";".join(f"{i}:{low}:{high}" for i, (low, high) in sorted(self._ranges.items()))
