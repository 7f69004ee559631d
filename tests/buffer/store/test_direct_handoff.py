"""The hand-off of groups from the write that seals them to the stream that waits."""

from __future__ import annotations

import pytest

from rollmesh.buffer.store.direct_handoff import Delivery, DirectHandoff, WaitingStream

STREAM = WaitingStream(incarnation=1, version=0, credits=1, token="t")


def test_groups_are_pending_while_a_write_leases_them_and_until_they_are_collected() -> None:
    handoff = DirectHandoff(lambda _table: None)
    with handoff.write_in_progress("train", []) as stream:
        assert stream is None
        assert not handoff.is_pending("train")
    assert not handoff.is_pending("train")
    handoff.offer("train", STREAM)
    with handoff.write_in_progress("train", []) as stream:
        assert stream is STREAM
        assert handoff.is_pending("train")
    assert not handoff.is_pending("train"), "it has leased nothing"
    handoff.offer("train", STREAM)
    with pytest.raises(ConnectionError), handoff.write_in_progress("train", []):
        raise ConnectionError
    assert handoff.is_pending("train")
    assert handoff.collect("train") == [Delivery(STREAM, None)]
    assert not handoff.is_pending("train")
