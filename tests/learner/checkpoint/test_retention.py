"""Checkpoints that are removed from the folder: never one that a learner may be told to start from."""

from __future__ import annotations

from pathlib import Path

from rollmesh.learner.checkpoint.retention import prune, sweep


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def make(root: Path, *folders: str) -> None:
    for name in folders:
        (root / name).mkdir()
        (root / name / "part").write_text("half")


def test_the_newest_stay_by_incarnation_and_version(tmp_path: Path) -> None:
    make(tmp_path, "i0001-v00000010", "i0001-v00000020", "i0002-v00000012", "i0002-v00000014")
    # A learner that was fenced has written last.
    make(tmp_path, "i0001-v00000030")
    prune(tmp_path, committed="i0002-v00000014", keep=3)
    assert names(tmp_path) == ["i0001-v00000030", "i0002-v00000012", "i0002-v00000014"]
    prune(tmp_path, committed="i0002-v00000014", keep=1)
    assert names(tmp_path) == ["i0002-v00000014"]


def test_the_committed_one_stays_however_old_it_is(tmp_path: Path) -> None:
    make(tmp_path, "i0001-v00000010", "i0001-v00000020", "i0002-v00000012")
    prune(tmp_path, committed="i0001-v00000010", keep=1)
    assert names(tmp_path) == ["i0001-v00000010", "i0002-v00000012"]


def test_one_that_is_being_copied_elsewhere_stays(tmp_path: Path) -> None:
    make(tmp_path, "i0001-v00000010", "i0001-v00000020", "i0001-v00000030", "i0001-v00000040")
    prune(tmp_path, committed="i0001-v00000040", keep=2, uploading="i0001-v00000010")
    assert names(tmp_path) == ["i0001-v00000010", "i0001-v00000030", "i0001-v00000040"]
    prune(tmp_path, committed="i0001-v00000040", keep=2, uploading="i0001-v00000040")
    assert names(tmp_path) == ["i0001-v00000030", "i0001-v00000040"]


def test_what_fenced_learners_left_unfinished_goes(tmp_path: Path) -> None:
    sweep(tmp_path / "none yet", 2)
    left = [".partial-i0001-v00000003", ".removed-i0001-v00000001"]
    others = [".partial-i0002-v00000004", ".partial-i0003-v00000004", ".partial-mine", "i0001-v00000002"]
    make(tmp_path, *left, *others)
    sweep(tmp_path, 2)
    assert names(tmp_path) == others
