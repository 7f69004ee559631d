"""The cache that is bounded by bytes, against a list of what was used last."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollmesh.mesh.trajectory.recent_values import RecentValues

LIMIT = 10


@given(st.lists(st.integers(1, 14), max_size=40))
def test_values_used_last_are_kept_as_far_as_their_bytes_allow(keys: list[int]) -> None:
    """A key's size is the key itself."""
    made: list[int] = []

    def make(key: int) -> str:
        made.append(key)
        return str(key)

    values = RecentValues(make, lambda key, _value: key, LIMIT)
    kept: list[int] = []
    for key in keys:
        before = len(made)
        assert values.get(key) == str(key)
        assert (len(made) == before) == (key in kept)
        kept = [*(one for one in kept if one != key), key]
        while sum(kept) > LIMIT and len(kept) > 1:
            del kept[0]
