"""The checkpoint folder: complete or absent, newest kept."""

from __future__ import annotations

import json

import pytest

from learner.checkpoint.store import CheckpointStore
from mesh.errors import DataError
from mesh.versions import PolicyVersion


class Engine:
    """Writes one file, or fails half-way."""

    rank = 0
    trained = True

    def __init__(self) -> None:
        self.fails = False
        self.saved = 0

    def barrier(self) -> None:
        pass

    def save_checkpoint(self, folder, extra) -> None:
        self.saved += 1
        (folder / "part").write_text("half")
        if self.fails:
            raise OSError(28, "No space left on device")
        (folder / "state.json").write_text(json.dumps(extra))


def test_a_failed_save_leaves_nothing_behind_that_looks_complete(tmp_path):
    store, engine = CheckpointStore(tmp_path, keep=2), Engine()
    engine.fails = True
    with pytest.raises(DataError, match="No space left"):
        store.save({"actor": engine}, PolicyVersion(1, 1), {})
    assert list(tmp_path.iterdir()) == []
    engine.fails = False
    path = store.save({"actor": engine}, PolicyVersion(1, 1), {"cursor": 3})
    assert json.loads((path / "state.json").read_text()) == {"cursor": 3, "incarnation": 1, "version": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["i0001-v00000001"]


def test_what_killed_learners_left_unfinished_goes_with_the_first_save_of_a_later_one(tmp_path):
    left = [".partial-i0001-v00000003", ".removed-i0001-v00000001", ".partial-i0003-v00000004", ".partial-mine"]
    for name in left:
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").write_text("half")
    CheckpointStore(tmp_path, keep=2).save({"actor": Engine()}, PolicyVersion(2, 3), {})
    assert {p.name for p in tmp_path.iterdir()} == {"i0002-v00000003", *left[2:]}


def test_the_newest_are_kept_by_age_not_by_number(tmp_path):
    store, engine = CheckpointStore(tmp_path, keep=2), Engine()
    for version in (10, 20, 30):
        store.save({"actor": engine}, PolicyVersion(1, version), {})
    assert [v.version for v, _ in store.list()] == [20, 30]
    # A new incarnation resumed at 20 and is at 21 now.
    store.save({"actor": engine}, PolicyVersion(2, 21), {})
    assert PolicyVersion(2, 21) in [v for v, _ in store.list()]
    assert len(store.list()) == 2


def test_saving_a_version_again_keeps_what_is_there(tmp_path):
    store, engine = CheckpointStore(tmp_path, keep=2), Engine()
    assert store.save({"actor": engine}, PolicyVersion(1, 1), {}) == store.save(
        {"actor": engine}, PolicyVersion(1, 1), {}
    )
    assert engine.saved == 1


def test_every_trained_role_has_its_part(tmp_path):
    actor, critic, frozen = Engine(), Engine(), Engine()
    frozen.trained = False
    engines = {"critic": critic, "reference": frozen, "actor": actor}
    path = CheckpointStore(tmp_path, keep=2).save(engines, PolicyVersion(1, 1), {"cursor": 3})
    assert sorted(str(p.relative_to(path)) for p in path.rglob("state.json")) == ["critic/state.json", "state.json"]
    assert json.loads((path / "state.json").read_text()) == {"cursor": 3, "incarnation": 1, "version": 1}
    assert frozen.saved == 0


def test_a_critic_that_cannot_be_saved_leaves_no_checkpoint(tmp_path):
    store, critic = CheckpointStore(tmp_path, keep=2), Engine()
    critic.fails = True
    with pytest.raises(DataError, match="No space left"):
        store.save({"actor": Engine(), "critic": critic}, PolicyVersion(1, 1), {})
    assert store.list() == []
