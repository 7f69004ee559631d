"""The best checkpoint: never pruned, of ties the first, and the newest learner's alone."""

from __future__ import annotations

import fcntl
import math
from pathlib import Path
from typing import Any, Literal

import pytest

from rollmesh.learner.checkpoint import best
from rollmesh.learner.checkpoint.best import FILE, Best, BestCheckpoint, best_checkpoint, protected_names
from rollmesh.learner.checkpoint.retention import prune
from rollmesh.learner.checkpoint.store import CheckpointStore
from rollmesh.learner.coordinator.best_tracker import BestTracker
from rollmesh.learner.evaluation.result import EvalResult
from rollmesh.mesh.errors import DataError, FencedError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from tests.learner.checkpoint.test_store import Engine


class Run:
    """A folder of checkpoints and a keeper of the best."""

    def __init__(self, root: Path, incarnation: int = 1, direction: Literal["max", "min"] = "max") -> None:
        self.incarnation = incarnation
        self.store = CheckpointStore(root)
        self.file = BestCheckpoint(root, incarnation)
        self.before = self.file.claim()
        self.tracker = BestTracker(self.file, metric="reward", direction=direction)
        self.root = root

    def save(self, version: int, *, evaluated: bool = False) -> None:
        policy = PolicyVersion(self.incarnation, version)
        engines: dict[str, Any] = {"actor": Engine()}
        path = self.store.begin(engines, policy, {}).result(240)
        prune(self.root, committed=path.name, keep=2)
        if evaluated:
            self.tracker.checkpoint_written(policy, path.name)

    def result(self, version: int, reward: float) -> None:
        self.tracker.round_finished(EvalResult(PolicyVersion(self.incarnation, version), reward, {}, 1, 0, 1.0, 1.0))

    @property
    def best(self) -> tuple[int, int] | None:
        found = best_checkpoint(self.root)
        return None if found is None else (found.incarnation, found.version)

    @property
    def versions(self) -> list[int]:
        return [policy.version for policy, _ in self.store.list()]


def test_the_best_stays_whatever_comes_later(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(0, evaluated=True)
    run.result(0, 0.5)
    for version in range(1, 6):
        run.save(version)
    assert run.best == (1, 0)
    assert run.versions == [0, 4, 5]
    run.save(6, evaluated=True)
    run.save(7)
    run.save(8)
    run.save(9)
    assert run.versions == [0, 6, 8, 9], "it is not known yet what version 6 is worth"
    run.result(6, 0.5)
    assert run.best == (1, 0), "of ties the first stays"
    run.save(10)
    assert run.versions == [0, 9, 10]
    run.save(11, evaluated=True)
    run.result(11, 0.75)
    run.save(12)
    assert run.best == (1, 11)
    run.save(13)
    assert run.versions == [11, 12, 13]


@pytest.mark.parametrize("direction", ["max", "min"])
def test_what_is_no_number_is_never_the_best(tmp_path: Path, direction: Literal["max", "min"]) -> None:
    run = Run(tmp_path, direction=direction)
    for version, reward in ((0, math.nan), (1, math.inf), (2, -math.inf)):
        run.save(version, evaluated=True)
        run.result(version, reward)
    assert run.best is None
    run.save(3, evaluated=True)
    run.result(3, 0.5)
    assert run.best == (1, 3)
    run.save(4, evaluated=True)
    run.result(4, math.nan)
    assert run.best == (1, 3)
    assert not Best("c", 1, 5, "other", "max", math.nan, "").beats(best_checkpoint(tmp_path))
    assert Best("c", 1, 5, "loss", "min", 9.0, "").beats(Best("c", 1, 4, "loss", "min", math.nan, ""))


def test_a_result_may_come_before_its_checkpoint_and_a_round_may_be_missed(tmp_path: Path) -> None:
    run = Run(tmp_path, direction="min")
    run.result(3, 0.5)
    assert run.best is None
    run.save(3, evaluated=True)
    assert run.best == (1, 3)
    run.save(4, evaluated=True)
    run.save(4, evaluated=True)
    run.tracker.round_abandoned(PolicyVersion(1, 4))
    assert protected_names(tmp_path) == {"i0001-v00000003"}
    run.save(5, evaluated=True)
    run.result(5, 0.25)
    assert run.best == (1, 5), "less is better here"


@pytest.mark.parametrize("how", ["measured", "missed"])
def test_a_checkpoint_behind_its_round_waits_for_nothing(tmp_path: Path, how: str) -> None:
    """No learner would ever release it: each would stay for the rest of the run."""
    run = Run(tmp_path)
    run.save(1, evaluated=True)
    run.result(1, 0.5)
    if how == "measured":
        run.save(2, evaluated=True)
        run.result(2, 0.25)
    else:
        run.tracker.round_abandoned(PolicyVersion(1, 2))
    run.save(2, evaluated=True)
    assert protected_names(tmp_path) == {"i0001-v00000001"}


def test_a_round_that_is_begun_anew_is_measured(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(1, evaluated=True)
    run.tracker.round_abandoned(PolicyVersion(1, 1))
    run.result(1, 0.5)
    run.save(1, evaluated=True)
    assert run.best == (1, 1)


def test_a_round_may_begin_and_end_while_the_checkpoint_before_is_written(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.result(1, 0.5)
    run.result(2, 0.25)
    run.save(1, evaluated=True)
    run.save(2, evaluated=True)
    assert run.best == (1, 1)
    assert protected_names(tmp_path) == {"i0001-v00000001"}, "no candidate waits for a round that has ended"


def test_a_successor_finds_the_best_and_the_superseded_changes_nothing(tmp_path: Path) -> None:
    first = Run(tmp_path)
    first.save(2, evaluated=True)
    first.result(2, 0.5)
    first.save(4, evaluated=True)
    second = Run(tmp_path, incarnation=2)
    assert second.before is not None
    assert (second.before.version, second.before.value) == (2, 0.5)
    assert protected_names(tmp_path) == {"i0001-v00000002"}, "nobody waits for the round of the old learner any more"
    with pytest.raises(FencedError):
        first.result(4, 0.9)
    with pytest.raises(FencedError):
        first.file.claim()
    assert second.best == (1, 2)
    second.save(3, evaluated=True)
    second.result(3, 0.6)
    assert second.best == (2, 3)


def test_values_of_another_metric_or_measured_otherwise_give_way_and_what_is_gone_is_not_the_best(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path)
    run.save(1)
    assert run.file.record_value(Best("i0001-v00000001", 1, 1, "reward", "max", 0.9, "so"))
    assert not run.file.record_value(Best("i0001-v00000002", 1, 2, "reward", "max", 0.95, "so")), (
        "there is no such folder"
    )
    run.save(2)
    assert run.file.record_value(Best("i0001-v00000002", 1, 2, "pass@4", "max", 0.1, "so"))
    assert run.best == (1, 2)
    run.save(3)
    assert not run.file.record_value(Best("i0001-v00000003", 1, 3, "pass@4", "max", 0.05, "so"))
    assert run.file.record_value(Best("i0001-v00000003", 1, 3, "pass@4", "max", 0.05, "otherwise"))
    assert run.best == (1, 3)


def test_a_metric_that_the_round_does_not_have_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path)
    run.tracker = BestTracker(run.file, metric="reward/other", direction="max")
    run.save(1, evaluated=True)
    run.result(1, 0.5)
    assert "has no reward/other" in caplog.text
    assert protected_names(tmp_path) == frozenset()


@pytest.mark.parametrize(
    "text", ['{"writer": 1', "[]", "null", "[" * 100_000, '{"writer": "x"}', '{"writer": 1, "best": {"value": "x"}}']
)
def test_a_file_that_cannot_be_read_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(DataError, match=FILE):
        best_checkpoint(tmp_path)


def test_a_stopped_learner_that_keeps_the_lock_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best, "LOCK_S", 0.1)
    with (tmp_path / ".best.lock").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(DataError, match=r"another learner has held .*\.best\.lock for"):
            BestCheckpoint(tmp_path, 2).claim()
    assert BestCheckpoint(tmp_path, 2).claim() is None
