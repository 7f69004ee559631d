"""Counts of a table, as the buffer's front reads them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollmesh.buffer.store.table_snapshot import TableSnapshot


@pytest.mark.parametrize("left", ["pending", "generating", "ready"])
def test_a_table_is_exhausted_once_its_data_has_ended_and_nothing_is_left(left: str) -> None:
    ended = TableSnapshot(end_of_data=1, leased=1, consumed=5)
    assert ended.exhausted
    assert not replace(ended, **{left: 1}).exhausted
    assert not replace(ended, end_of_data=0).exhausted


def test_a_table_that_was_never_read_is_an_empty_one() -> None:
    assert TableSnapshot() == TableSnapshot.from_reply([*[0] * 14, 1 << 60, 0, 0])
