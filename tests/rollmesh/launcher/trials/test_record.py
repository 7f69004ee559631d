"""The choice is kept for as long as configuration and machine are the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rollmesh.launcher.trials.memory import refused_together
from rollmesh.launcher.trials.opening import chosen_before, digest_here, opening
from rollmesh.launcher.trials.record import Estimated, Measured, PlacementRecord, digest_of, read_record
from rollmesh.mesh.config import Config, load_config


def asked(folder: Path, *overrides: str) -> Config:
    values = {"run": {"dir": str(folder), "name": "run"}, "model": {"path": "m"}, "data": {"train": "t.jsonl"}}
    return load_config(values, ["placement=auto", *overrides])


def chosen(config: Config, *, decided: bool = True) -> PlacementRecord:
    return PlacementRecord(
        mode="split",
        asked="auto",
        name="split",
        settings={"placement.mode": "split"},
        decided=decided,
        step=12,
        estimates=(Estimated("split", 0.25, 0.5),),
        measured=(Measured("collocated", 0.5, 4), Measured("split", 0.25, 5), Measured("hybrid", None, 0, "it died")),
        valid_for=digest_here(config),
    )


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ("learner.steps=900", True),
        ("run.seed=7", True),
        ("checkpoint.every_s=5", True),
        ("rollout.max_response_tokens=77", False),
        ("learner.ranks=2", False),
        ("placement.trial_batches=9", False),
    ],
)
def test_a_choice_holds_for_what_it_was_measured_with(tmp_path: Path, change: str, kept: bool) -> None:
    config = asked(tmp_path)
    config.run.folder.mkdir()
    assert opening(config).placement.mode == "collocated"
    record = chosen(config)
    record.write(config.run.folder)
    assert read_record(config.run.folder) == record == chosen_before(config)
    assert opening(config).placement.mode == "split"
    assert opening(config, fresh=True).placement.mode == "collocated"
    changed = opening(asked(tmp_path, change))
    assert changed.placement.mode == ("split" if kept else "collocated")
    assert digest_of(config, 2, []) != digest_of(config, 4, [])


@pytest.mark.parametrize(
    ("steps", "trained", "kept"),
    [(120, 61, True), (90, 61, True), (121, 61, False), (400, 120, False), (121, 120, True)],
)
def test_a_longer_run_tries_what_too_few_steps_were_left_for(
    tmp_path: Path, steps: int, trained: int, kept: bool
) -> None:
    """Unless the steps that were added are too few for a trial."""
    config = asked(tmp_path, f"learner.steps={steps}")
    config.run.folder.mkdir()
    record = {"step": trained, "time": 1.0, "critic/score/mean": 0.0}
    (config.run.folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    before = replace(chosen(config), steps=120, untried=("hybrid",))
    before.write(config.run.folder)
    assert chosen_before(config) == (before if kept else None)
    assert opening(config).placement.mode == ("split" if kept else "collocated")
    tried = replace(before, untried=())
    tried.write(config.run.folder)
    assert chosen_before(config) == tried


def test_trials_that_were_cut_off_begin_again(tmp_path: Path) -> None:
    config = asked(tmp_path)
    config.run.folder.mkdir()
    chosen(config, decided=False).write(config.run.folder)
    assert opening(config).placement.mode == "collocated"


def test_a_placement_that_was_named_is_as_it_is(tmp_path: Path) -> None:
    config = asked(tmp_path, "placement=hybrid")
    assert opening(config) is config
    assert PlacementRecord("hybrid", "hybrid").text == ""


def test_the_record_in_words(tmp_path: Path) -> None:
    times = "collocated 0.5 s, split 0.25 s, hybrid failed"
    record = chosen(asked(tmp_path))
    assert record.text == f"auto chose split at step 12; seconds per batch: {times}"
    assert chosen(asked(tmp_path), decided=False).text == f"auto, now split; seconds per batch so far: {times}"
    few = "; too few steps were left to try"
    assert replace(record, untried=("hybrid",)).text == f"{record.text}{few} hybrid"
    assert replace(record, untried=("hybrid", "a", "b")).text == f"{record.text}{few} hybrid and 2 more"
    undecided = PlacementRecord("collocated", "auto", "collocated", undecided="5 steps are left")
    assert undecided.text == "no decision: 5 steps are left"
    assert record.to_summary()["mode"] == "split"


def test_a_damaged_record_is_none(tmp_path: Path) -> None:
    assert read_record(tmp_path) is None
    (tmp_path / "placement.json").write_text('{"mode": "split"')
    assert read_record(tmp_path) is None


def test_sides_whose_peaks_exceed_the_memory_do_not_work_together() -> None:
    """Peaks of different phases count together, and `all`, which is of one moment, does not."""
    peaks = {
        "training": {"learner": {"anon": 6000.0}, "generator-0": {"anon": 400.0}, "all": {"anon": 6400.0}},
        "generating": {"learner": {"anon": 300.0}, "generator-0": {"anon": 4000.0}, "all": {"anon": 4300.0}},
    }
    assert refused_together(peaks, 12 << 30) == ""
    assert "9.8 GiB" in refused_together(peaks, 10 << 30)
