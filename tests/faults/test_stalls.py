"""A mesh that stands still is found, told apart by what helps, and made to continue."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.faults import stalls
from tests.faults.moments import Moments
from tests.faults.observe import StepWatch, WriteRecord
from tests.faults.processes import FaultError
from tests.faults.stalls import Progress
from tests.faults.world import World


class Mesh:
    """Trains `ahead` steps, and more only after a service was killed; stands for world, moments and writes."""

    def __init__(self, folder: Path, ahead: int, stuck: str) -> None:
        self._metrics = (folder / "metrics.jsonl").open("a")
        self._stuck = stuck
        self._steps = 0
        self.killed: list[str] = []
        self.settings = SimpleNamespace(staleness=1)
        self.fronts = ["127.0.0.1:1"]
        self.supervisor = self
        self.train(ahead)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self._steps += 1
            self._metrics.write(json.dumps({"incarnation": 1, "version": self._steps, "staleness/max": 0}) + "\n")
        self._metrics.flush()

    def kill9(self, name: str) -> None:
        self.killed.append(name)
        if name == self._stuck:
            self.train(3)

    def current(self, _name: str) -> SimpleNamespace:
        return SimpleNamespace(began=-1e9)

    def counts(self, table: str = "train") -> dict[str, int]:
        return {"leased": 8 if table == "train" else 0}

    def wait_write(self, _name: str, after: float, _until: float) -> float:
        return after


@pytest.fixture
def progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Mesh, Progress]]]:
    for name in ("GRACE_S", "_WATCHED_S", "START_S"):
        monkeypatch.setattr(stalls, name, 0.3)
    monkeypatch.setattr(stalls, "who_waits", lambda _address: "the batch is leased in full")
    watch = StepWatch(tmp_path / "metrics.jsonl")

    def make(ahead: int, stuck: str = "") -> tuple[Mesh, Progress]:
        mesh = Mesh(tmp_path, ahead, stuck)
        as_any = cast("Any", mesh)
        return mesh, Progress(
            cast("World", as_any), watch, cast("WriteRecord", as_any), cast("Moments", as_any), lambda _line: None
        )

    yield make
    watch.close()


def test_a_mesh_that_goes_on_has_no_stall(progress: Callable[..., tuple[Mesh, Progress]]) -> None:
    mesh, seen = progress(0)
    end = time.monotonic()
    mesh.train(3)
    assert seen.restored(["kill learner"], end) >= end
    assert (seen.stalls, mesh.killed) == ([], [])


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_stall_is_told_even_after_steps_that_were_gathered_before(
    progress: Callable[..., tuple[Mesh, Progress]], ahead: int
) -> None:
    end = time.monotonic()
    mesh, seen = progress(ahead, "generator-1")
    seen.restored(["cut learner>front"], end)
    (stall,) = seen.stalls
    assert (stall.kinds, stall.what, stall.work) == (["cut learner>front"], "no step", {"leased": 8})
    assert stall.ended_by == "killing the generators"
    assert stall.waits == "the batch is leased in full"
    assert stall.lasted_s >= 0.6
    assert mesh.killed == ["learner", "generator-0", "generator-1"]


def test_where_nothing_helps_the_run_ends_and_the_stall_is_recorded(
    progress: Callable[..., tuple[Mesh, Progress]],
) -> None:
    _, seen = progress(0)
    with pytest.raises(FaultError, match="nothing helps"):
        seen.restored(["kill redis"], time.monotonic())
    assert [stall.ended_by for stall in seen.stalls] == ["nothing"]
