"""The images of a micro-batch are divided over the processes that share it, by whole prompts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollmesh.learner.engines.fsdp2.ulysses.images import parts_of_prompts


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 8))
def test_neighbours_have_about_as_many_features(features: list[int], parts: int) -> None:
    found = parts_of_prompts(features, parts)
    assert found == sorted(found)
    assert set(found) <= set(range(parts))
    loads = [sum(size for size, part in zip(features, found, strict=True) if part == own) for own in range(parts)]
    assert max(loads) <= sum(features) / parts + max(features)
