"""The versions that sampled a group's tokens, as far as the staleness bound needs them: a range per incarnation."""

from __future__ import annotations

from collections.abc import Iterable

from rollmesh.mesh.trajectory.lineage import Lineage
from rollmesh.mesh.trajectory.versions import PolicyVersion


class VersionRanges:
    """Lowest and highest version per incarnation among a group's tokens.

    `Lineage.effective` is not monotonic in the version, but on each incarnation its least value is at one of the two
    ends. So the ends are enough to find the oldest token under any later lineage.
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
