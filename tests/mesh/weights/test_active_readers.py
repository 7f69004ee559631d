"""Readers and the versions that they fetch."""

from __future__ import annotations

from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.weights.active_readers import GRACE_S, ActiveReaders

OLD, NEW = PolicyVersion(1, 0), PolicyVersion(1, 1)


def test_a_version_is_active_while_it_is_read_and_a_moment_longer() -> None:
    now = 1e6
    readers = ActiveReaders(lambda: now)
    assert not readers.active(OLD)
    with readers.reading(OLD):
        with readers.reading(OLD):
            now += 100 * GRACE_S
        now += GRACE_S
        assert readers.active(OLD)
        assert not readers.active(NEW)
    now += 0.9 * GRACE_S
    with readers.reading(NEW):
        pass
    assert readers.active(OLD)
    assert readers.active(NEW)
    now += 0.2 * GRACE_S
    assert not readers.active(OLD)
    with readers.reading(NEW):
        pass
    assert list(readers._ended) == [NEW], "what is over is forgotten"
