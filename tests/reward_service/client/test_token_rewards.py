"""Rewards of parts of a response become rewards of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from rollmesh.mesh.trajectory.payload_codec import Trajectory
from rollmesh.mesh.trajectory.versions import PolicyVersion, VersionRuns
from rollmesh.protos import reward_pb2
from rollmesh.reward_service.client.token_rewards import token_rewards

ENDS = [1, 1, 4, 6]


class Ends:
    """Each token of a turn has one character, and no other is asked for."""

    def __init__(self, ends: Sequence[int] = ()) -> None:
        self.ends = ends

    def token_ends(self) -> Sequence[int]:
        assert self.ends
        return self.ends

    def turn_ends(self, turn: int) -> Sequence[int]:
        return range(1, 99)


def tokens(mask: Sequence[int]) -> Trajectory:
    ids = np.zeros(len(mask), np.int32)
    versions = VersionRuns(((len(mask), PolicyVersion(1, 1)),))
    return Trajectory(ids, np.zeros(len(mask), np.float32), np.array(mask, np.uint8), versions)


def found_for(mask: Sequence[int], *spans: dict[str, Any], ends: Sequence[int] = ()) -> NDArray[np.float32] | None:
    return token_rewards(reward_pb2.Scored(total=1.0, spans=spans), Ends(ends), tokens(mask))


def rewards(mask: list[int], *spans: tuple[int, int, float]) -> list[float] | None:
    named = [{"begin": begin, "end": end, "value": value} for begin, end, value in spans]
    found = found_for(mask, *named, ends=ENDS)
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
    assert token_rewards(scored, Ends(), tokens([1] * 4)).tolist() == [1.0, 2.0, 3.0, 4.0]  # type: ignore[union-attr]
    scored.spans.add(begin=1, end=4, value=0.5)
    assert token_rewards(scored, Ends(ENDS), tokens([1] * 4)).tolist() == [1.0, 2.0, 3.5, 4.0]  # type: ignore[union-attr]


def test_a_span_may_be_one_of_a_turn() -> None:
    mask = [0, 1, 1, 0, 0, 1, 1, 1, 0]
    found = found_for(mask, {"turn": 2, "begin": 0, "end": 2, "value": 1.0}, {"turn": 1, "value": 2.0})
    assert found is not None
    assert found.tolist() == [0, 0, 2.0, 0, 0, 0, 1.0, 0, 0]
    late = found_for(mask, {"turn": 1, "begin": 1, "end": 9, "value": 1.0})
    assert late is not None
    assert late.tolist().index(1.0) == 2, "it leaves its turn for no other"


def test_a_part_of_the_total_is_moved_and_not_added() -> None:
    mask = [1, 1, 0, 1, 1, 0]
    found = found_for(mask, {"turn": 1, "value": 0.75, "of_total": True}, {"turn": 2, "value": 0.25, "of_total": True})
    assert found is not None
    assert found.tolist() == [0, 0.75, 0, 0, -0.75, 0]
    both = found_for(mask, {"turn": 1, "value": 0.75, "of_total": True}, {"turn": 1, "value": 0.5})
    assert both is not None
    assert both.tolist() == [0, 1.25, 0, 0, -0.75, 0]


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40), st.randoms(use_true_random=False))
def test_moved_values_change_no_sum_in_whatever_order(values: list[float], random: Any) -> None:
    """A group's members whose totals are equal stay equal: a deviation of rounding errors would be scaled to one."""
    spans = [{"turn": turn, "value": value, "of_total": True} for turn, value in enumerate(values, 1)]
    found = found_for([1, 0] * len(values), *spans)
    assert found is not None
    order = found.tolist()
    random.shuffle(order)
    total = np.float32(0.0)
    for value in order:
        total = np.float32(total + np.float32(value))
    assert total == 0.0
    size = sum(map(abs, values))
    assert np.allclose(found[:-2:2], values[:-1], rtol=0, atol=size * 2.0**-20)


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
    named = [{"begin": begin, "end": end, "value": value} for begin, end, value in spans]
    found = found_for(mask, *named, ends=ends)
    assert found is not None
    assert found.sum() == sum(value for *_, value in spans)
    assert not found[np.array(mask) == 0].any()
