"""Calls of a session: whatever comes twice, late or never, each is done once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.learner.role_service.numbered_calls import NumberedCalls
from rollmesh.mesh.errors import PayloadError, RoleLostError


@given(st.lists(st.integers(1, 6)))
def test_each_call_is_done_once_and_in_order(numbers: list[int]) -> None:
    calls: NumberedCalls[str] = NumberedCalls()
    done: list[int] = []

    def start(number: int) -> str:
        done.append(number)
        return f"outcome {number}"

    for number in numbers:
        last = len(done)
        if last < number - 1:
            with pytest.raises(RoleLostError):
                calls.begin(number, lambda number=number: start(number))
        elif number < last:
            with pytest.raises(PayloadError, match="is over"):
                calls.begin(number, lambda number=number: start(number))
        else:
            assert calls.begin(number, lambda number=number: start(number)) == f"outcome {number}"
    assert done == list(range(1, len(done) + 1))
