"""The items of one call for scores; what is needed of them here is computed once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rollmesh.mesh.errors import PayloadError
from rollmesh.mesh.trajectory.content_key import content_key
from rollmesh.protos import reward_pb2
from rollmesh.reward_service.outcomes import Failed, RewardItem


class Request:
    """Items, known by their indices."""

    def __init__(self, items: Sequence[reward_pb2.ScoreItem]) -> None:
        self.items = items
        self._parsed: dict[int, RewardItem | Failed] = {}
        self._contents: dict[int, bytes] = {}

    def content(self, index: int) -> bytes:
        """An item's content key."""
        if index not in self._contents:
            self._contents[index] = content_key(self.items[index])
        return self._contents[index]

    def groups(self, indices: Iterable[int]) -> list[list[int]]:
        """Indices by their items' groups."""
        groups: dict[str, list[int]] = {}
        for index in indices:
            groups.setdefault(self.items[index].group_id, []).append(index)
        return list(groups.values())

    def parsed(self, index: int) -> RewardItem | Failed:
        """An item as functions see it, or the error if it cannot be read."""
        if index not in self._parsed:
            try:
                self._parsed[index] = RewardItem.from_proto(self.items[index])
            except PayloadError as error:
                self._parsed[index] = Failed("bad_input", str(error))
        return self._parsed[index]
