"""A stream is woken for its own member alone, and counted while it is open."""

from __future__ import annotations

from rollmesh.buffer.server.change_notifier import OpenStreams


def test_only_the_streams_of_a_member_are_woken() -> None:
    woken: list[str] = []
    streams = OpenStreams()
    with (
        streams.opened("one", lambda: woken.append("one")),
        streams.opened("two", lambda: woken.append("two")),
        streams.opened("one", lambda: woken.append("one again")),
    ):
        assert len(streams) == 3
        streams.wake(["one", "elsewhere"])
        assert woken == ["one", "one again"]
        woken.clear()
        streams.wake_all()
        assert sorted(woken) == ["one", "one again", "two"]
    assert len(streams) == 0
    streams.wake(["one", "two"])
    assert len(woken) == 3, "those that are closed are not called"
