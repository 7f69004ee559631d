"""The studies of learning: their configurations, and what they make of their runs."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.learning import algorithms, staleness, studies
from benchmarks.learning.studies import Results, overlay
from benchmarks.mesh_run import MeshRun, RunFailedError
from rollmesh.learner.builders import build_algorithm
from rollmesh.mesh.config import load_config


def finished(tmp_path: Path, rewards: list[float], ages: list[dict[str, int]]) -> MeshRun:
    steps = [{"staleness/histogram": histogram} for histogram in ages]
    held_out = [{"step": 25 * index, "seconds": 1.0, "reward": reward} for index, reward in enumerate(rewards)]
    summary = {"held_out": held_out, "steps": len(steps), "training_s": 2.5, "groups_by_fate": {"trained": 1}}
    return MeshRun(tmp_path, steps, summary)


def test_overlay_goes_key_by_key() -> None:
    assert overlay({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"c": 4}, "e": 5}) == {"a": {"b": 1, "c": 4}, "d": 3, "e": 5}


@pytest.mark.parametrize("name", algorithms.ALGORITHMS)
def test_every_algorithm_has_a_valid_configuration(name: str, tmp_path: Path) -> None:
    config = load_config(algorithms.study_config(name, 1, tmp_path, tmp_path, steps=7))
    assert (config.algorithm.name, config.run.seed, config.learner.batch.groups) == (name, 1, 32)
    assert config.eval.stop_at == algorithms.GOAL
    build_algorithm(config)


@pytest.mark.parametrize("correction", staleness.CORRECTIONS)
@pytest.mark.parametrize("bound", staleness.BOUNDS)
def test_every_bound_has_a_valid_configuration(bound: int, correction: str, tmp_path: Path) -> None:
    args = staleness._parse([])
    config = load_config(staleness.study_config(bound, correction, 2, tmp_path, tmp_path, args))
    assert (config.buffer.max_staleness, config.eval.stop_at) == (bound, None)
    build_algorithm(config)


def test_a_run_is_measured_by_its_evaluations(tmp_path: Path) -> None:
    run = finished(tmp_path, [0.2, 0.81, 0.79], [{"0": 1}, {"1": 2, "4": 1}])
    found = algorithms.measure(run)
    assert (found["before"], found["after"], found["best"], found["reached"]) == (0.2, 0.79, 0.81, True)
    assert (found["staleness_mean"], found["staleness_max"]) == (1.5, 4)
    assert not algorithms.measure(finished(tmp_path, [0.2, 0.79], [{"0": 1}]))["reached"]


def test_a_run_without_an_evaluation_has_failed(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match="no evaluation"):
        algorithms.measure(MeshRun(tmp_path, [], {"held_out": [{"step": 0, "seconds": 0.0, "reward": None}]}))


def test_what_an_interrupted_run_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "place" / "run").mkdir(parents=True)
    assert not studies.fresh(tmp_path / "place").exists()
    assert tmp_path.exists()


def test_the_start_of_a_run_is_not_counted_as_its_age(tmp_path: Path) -> None:
    run = finished(tmp_path, [0.2, 0.8], [{"0": 1}] * 4 + [{"2": 5}] * 6)
    assert staleness.measure(run, bound=2)["staleness_mean"] == 2.0


def test_results_survive_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def run_mesh(config: dict[str, Any], *, timeout_s: float) -> MeshRun:
        started.append(config["run"])
        if config["run"] == "bad":
            raise RunFailedError("exit code 1")
        return finished(tmp_path, [0.1, 0.9], [{"1": 1}])

    monkeypatch.setattr(studies, "run_mesh", run_mesh)
    path = tmp_path / "out.json"
    results = Results.open(path, "learning")
    for name in ("good", "bad"):
        results.run(
            name, {"run": name, "algorithm": "grpo"}, {"name": name, "seed": 0, "changes": {}}, algorithms.measure
        )
    assert started == ["good", "bad"]
    again = Results.open(path, "learning")
    assert again.done("good")
    assert not again.done("bad")
    assert list(again.measured) == ["good"]
    assert "1 of 1" in algorithms.summary(again.measured, ["good"])
    with pytest.raises(ValueError, match="learning"):
        Results.open(path, "staleness")
    assert json.loads(path.read_text())["machine"]["cores"] >= 1


def record(bound: int, correction: str, after: float) -> dict[str, Any]:
    return {
        "bound": bound,
        "correction": correction,
        "steps": 300,
        "after": after,
        "best": after,
        "staleness_mean": bound * 0.9,
        "staleness_max": bound,
        "ess": 0.9,
        "k3_kl": None,
    }


def test_the_figure_has_a_line_per_correction() -> None:
    records = {f"{b}/{c}": record(b, c, 0.8 - 0.01 * b) for b in (0, 4) for c in ("truncated_is", "none")}
    drawing = staleness.draw(records)
    ElementTree.fromstring(drawing)
    assert "uncorrected" in drawing
    assert "behaviour anchor" not in drawing
    rows = staleness.summary(records).splitlines()[2:]
    assert [row.split(" | ")[0].strip("| ") for row in rows] == ["0", "0", "4", "4"]


@pytest.mark.parametrize("module", [algorithms, staleness])
def test_scripts_say_how_to_run_them(module: ModuleType) -> None:
    assert f"python -m {module.__name__} " in (module.__doc__ or "")
