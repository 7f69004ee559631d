"""Rewards of parts of a response become rewards of tokens."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.protos import reward_pb2
from rollmesh.reward_service.client.token_rewards import token_rewards

ENDS = [1, 1, 4, 6]


def rewards(mask: list[int], *spans: tuple[int, int, float]) -> list[float] | None:
    scored = reward_pb2.Scored(spans=[{"begin": begin, "end": end, "value": value} for begin, end, value in spans])
    found = token_rewards(scored, lambda: ENDS, np.array(mask, np.uint8))
    return None if found is None else found.tolist()


def test_a_parts_value_goes_to_its_last_token() -> None:
    assert rewards([1, 1, 1, 1], (0, 1, 0.5), (1, 4, 0.25), (2, 6, -1.0)) == [0.5, 0.0, 0.25, -1.0]
    assert rewards([1, 1, 1, 1], (0, 3, 1.0)) == [0.0, 0.0, 1.0, 0.0], "its last character ends with the third token"
    assert rewards([1, 1, 1, 1], (0, 2, 1.0), (1, 3, 1.0)) == [0.0, 0.0, 2.0, 0.0]
    assert rewards([1, 1, 1, 1]) is None


def test_tokens_that_were_not_sampled_get_none() -> None:
    assert rewards([1, 1, 0, 1], (1, 4, 1.0)) == [0.0, 1.0, 0.0, 0.0]
    assert rewards([0, 1, 1, 1], (0, 1, 1.0)) == [0.0, 1.0, 0.0, 0.0]
    assert rewards([0, 0, 0, 0], (0, 1, 1.0)) is None


def test_values_of_tokens_are_taken_as_they_are() -> None:
    scored = reward_pb2.Scored(per_token=[1.0, 2.0, 3.0, 4.0])
    assert token_rewards(scored, list, np.ones(4, np.uint8)).tolist() == [1.0, 2.0, 3.0, 4.0]  # type: ignore[union-attr]


@given(st.data())
def test_no_value_is_lost(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=20).filter(any))
    ends = np.cumsum(counts).tolist()
    mask = data.draw(st.lists(st.integers(0, 1), min_size=len(ends), max_size=len(ends)).filter(any))
    spans = data.draw(
        st.lists(
            st.tuples(st.integers(0, ends[-1] - 1), st.integers(1, ends[-1]), st.integers(-8, 8)).filter(
                lambda span: span[0] < span[1]
            ),
            min_size=1,
        )
    )
    scored = reward_pb2.Scored(spans=[{"begin": begin, "end": end, "value": value} for begin, end, value in spans])
    found = token_rewards(scored, lambda: ends, np.array(mask, np.uint8))
    assert found is not None
    assert found.sum() == sum(value for *_, value in spans)
    assert not found[np.array(mask) == 0].any()
