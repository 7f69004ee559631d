"""The trials of a run, on a mesh that writes the records of steps with their times, and computes nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import pytest

from rollmesh.launcher.placement.visible import VisibleDevices
from rollmesh.launcher.trials import trials as module
from rollmesh.launcher.trials.candidates import Candidate, candidates
from rollmesh.launcher.trials.control import MeshControl
from rollmesh.launcher.trials.disturbances import MeshState
from rollmesh.launcher.trials.record import PlacementRecord, read_record
from rollmesh.launcher.trials.trials import Trials
from rollmesh.mesh.config import load_config
from rollmesh.mesh.errors import RollmeshError

DEADLINE_S = 240.0


class Mesh:
    """Writes steps whose times are those of the placement in force; one without a time fails.

    Args:
        folder: of the run.
        batch_s: seconds per batch by placement.
        started_s: of the services.
    """

    def __init__(self, folder: Path, batch_s: Mapping[str, float], started_s: float) -> None:
        self._folder = folder
        self._batch_s = batch_s
        self.step, self._now = 0, 1000.0
        self.state = MeshState()
        self.failure: RollmeshError | None = None
        # Called after each step with its placement.
        self.after: Callable[[str], None] = lambda _name: None
        self.places: list[str] = []
        self.events: list[str] = []
        self.kept = False
        self.control = MeshControl(
            self.place,
            lambda: self.failure,
            self.keep,
            lambda: self.strangers,
            self.refusal,
            self.look,
            self.events.append,
            self._now - started_s,
            lambda: self._now,
        )
        self.strangers: list[str] = []
        self.refused: dict[str, str] = {}

    async def place(self, candidate: Candidate) -> None:
        assert not self.kept
        self.places.append(candidate.name)
        if candidate.name not in self._batch_s:
            raise RollmeshError(f"{candidate.name} cannot run")

    async def look(self) -> MeshState:
        return self.state

    def keep(self) -> None:
        self.kept = True

    def evaluate(self, seconds: float) -> None:
        """Evaluates between two steps."""
        self._now += seconds
        record = {"step": self.step, "time": self._now, "eval/reward": 0.0, "eval/seconds": seconds}
        with (self._folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    async def refusal(self, candidate: Candidate) -> str:
        return self.refused.get(candidate.name, "")

    async def work(self) -> None:
        """Trains without end."""
        while True:
            name = self.places[-1] if self.places else "collocated"
            self.step += 1
            self._now += self._batch_s.get(name, 1.0)
            record = {"step": self.step, "time": self._now, "critic/score/mean": 0.0, "timing_s/gen": 0.0}
            if name != "split":
                record["placement/turns"] = float(self.step // 2)
            with (self._folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
            self.after(name)
            await asyncio.sleep(0.001)


Tried = Callable[..., Awaitable[tuple[Mesh, PlacementRecord]]]


@pytest.fixture
def tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tried:
    """Runs the trials of a mesh to their end."""
    monkeypatch.setattr(module, "_LOOK_S", 0.002)

    async def run(
        batch_s: Mapping[str, float],
        *overrides: str,
        started_s: float = 0.0,
        refused: Mapping[str, str] | None = None,
        strangers: Sequence[str] = (),
        prepare: Callable[[Mesh], None] = lambda _mesh: None,
        ends_amid: str = "",
    ) -> tuple[Mesh, PlacementRecord]:
        asked = load_config(
            {"run": {"dir": str(tmp_path), "name": "run"}, "model": {"path": "m"}, "data": {"train": "t.jsonl"}},
            ["placement=auto", "learner.steps=100000", *overrides],
        )
        asked.run.folder.mkdir()
        mesh = Mesh(asked.run.folder, batch_s, started_s)
        mesh.refused, mesh.strangers = dict(refused or {}), list(strangers)
        found, left_out = candidates(asked, VisibleDevices(), 2)
        trials = Trials(asked, found, left_out, "digest", mesh.control)
        prepare(mesh)
        working = asyncio.create_task(mesh.work())
        running = asyncio.create_task(trials.run())

        def end(name: str) -> None:
            if name == ends_amid and mesh.step > 2:
                running.cancel()

        if ends_amid:
            mesh.after = end
        try:
            async with asyncio.timeout(DEADLINE_S):
                await asyncio.wait([running])
        finally:
            working.cancel()
            running.cancel()
        if ends_amid:
            return mesh, trials.record
        await running
        assert mesh.kept
        kept = read_record(asked.run.folder)
        assert kept == trials.record
        assert trials.record.decided
        return mesh, trials.record

    return run


@pytest.mark.parametrize(
    ("batch_s", "places", "chosen"),
    [
        ({"collocated": 1.0, "split": 0.5, "hybrid": 0.8}, ["split", "hybrid", "split"], "split"),
        ({"collocated": 1.0, "split": 0.5, "hybrid": 0.4}, ["split", "hybrid"], "hybrid"),
        ({"collocated": 1.0, "split": 1.5, "hybrid": 1.1}, ["split", "hybrid", "collocated"], "collocated"),
        # Nothing but what was measured first can run.
        ({"collocated": 1.0}, ["split", "hybrid", "collocated"], "collocated"),
    ],
)
async def test_the_fastest_placement_stays(
    tried: Tried, batch_s: Mapping[str, float], places: list[str], chosen: str
) -> None:
    mesh, record = await tried(batch_s)
    assert [name for name in places if name in mesh.places] == places
    assert mesh.places[-1] == record.name == record.mode == chosen
    assert len(mesh.places) <= 3
    for one in record.measured:
        assert one.batch_s == pytest.approx(batch_s[one.placement], rel=0.1) if one.batch_s else one.failure
    assert f"auto chose {chosen}" in mesh.events[-1]
    assert record.untried == ()


async def test_a_run_that_ends_soon_stays_as_it_is(tried: Tried) -> None:
    mesh, record = await tried({"collocated": 1.0, "split": 0.1}, started_s=1e9)
    assert mesh.places == []
    assert record.steps == 100000
    assert set(record.untried) == {"split", "hybrid"}
    assert f"too few steps were left to try {record.untried[0]} and 1 more" in mesh.events[-1]
    assert record.mode == "collocated"
    assert {one.placement for one in record.estimates} == {"split", "hybrid"}
    assert any("estimates, seconds per batch: split" in event for event in mesh.events)


async def test_what_does_not_fit_is_not_tried(tried: Tried) -> None:
    refused = {"split": "too large", "hybrid": "too large"}
    mesh, record = await tried({"collocated": 1.0, "split": 0.1}, refused=refused)
    assert mesh.places == []
    assert record.left_out == ("split: too large", "hybrid: too large")
    assert record.untried == ()


async def test_generators_that_were_started_by_hand_are_not_left_asleep(tried: Tried) -> None:
    mesh, record = await tried({"collocated": 1.0, "split": 0.1}, strangers=["by-hand"])
    assert mesh.places == []
    assert "by-hand" in record.left_out[0]


async def test_a_trial_ends_once_it_is_much_slower(tried: Tried) -> None:
    _, record = await tried({"collocated": 1.0, "split": 400.0, "hybrid": 2.0})
    failed = {one.placement: one.failure for one in record.measured}
    assert failed["split"] == "it is more than 3 times slower"
    assert record.name == "collocated"


async def test_an_evaluation_amid_a_trial_is_no_slowness(tried: Tried) -> None:
    def prepare(mesh: Mesh) -> None:
        left = [3]

        def after(name: str) -> None:
            mesh.state = MeshState()
            if name == "split" and left[0]:
                left[0] -= 1
                mesh.state = MeshState(evaluates=True)
                mesh.evaluate(1000.0)

        mesh.after = after

    _, record = await tried({"collocated": 1.0, "split": 0.5}, prepare=prepare)
    assert record.name == "split"
    assert {one.placement: one.batch_s for one in record.measured}["split"] == pytest.approx(0.5, rel=0.1)


async def test_a_service_that_gives_up_ends_its_trial(tried: Tried) -> None:
    def prepare(mesh: Mesh) -> None:
        def after(name: str) -> None:
            mesh.failure = RollmeshError("it has died too often") if name == "split" else None

        mesh.after = after

    _, record = await tried({"collocated": 1.0, "split": 0.1, "hybrid": 2.0}, prepare=prepare)
    assert {one.placement: one.failure for one in record.measured}["split"] == "it has died too often"
    assert record.name == "collocated"


async def test_a_chosen_placement_that_cannot_run_again_gives_way_to_the_next(tried: Tried) -> None:
    batch_s = {"collocated": 1.0, "split": 0.8, "hybrid": 0.5}

    def prepare(mesh: Mesh) -> None:
        def after(name: str) -> None:
            if name == "split":
                batch_s.pop("hybrid", None)

        mesh.after = after

    mesh, record = await tried(batch_s, prepare=prepare)
    assert mesh.places == ["hybrid", "split", "hybrid", "split"]
    assert record.name == "split"
    assert {one.placement: one.failure for one in record.measured}["hybrid"] == "hybrid cannot run"


async def test_a_run_that_ends_amid_a_trial_has_no_decision(tried: Tried) -> None:
    _, record = await tried({"collocated": 1.0, "split": 0.5}, ends_amid="split")
    assert record.text.startswith("no decision: the run ended amid the trial of split; seconds per batch: collocated 1")
    assert not record.decided
    assert record.trial_s >= 0.5
    _, record = await tried({"collocated": 1.0}, "run.name=other", ends_amid="collocated")
    assert record.text == "no decision: the run ended amid the first measurement"


@pytest.mark.parametrize(("steps", "state"), [(40, MeshState()), (100000, MeshState(data_left=9))])
async def test_a_trial_needs_batches_that_are_left(tried: Tried, steps: int, state: MeshState) -> None:
    """The launch has taken 20 s, and 0.5 s a batch would be gained at best; or the data end sooner than a trial."""

    def prepare(mesh: Mesh) -> None:
        mesh.state = state

    mesh, record = await tried(
        {"collocated": 0.5, "split": 0.25}, f"learner.steps={steps}", started_s=20.0, prepare=prepare
    )
    assert mesh.places == []
    assert record.name == "collocated"
    assert "split" in record.untried
