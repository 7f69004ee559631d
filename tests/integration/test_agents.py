"""The examples of agents in the real mesh: episodes of several turns are scored, stored and trained, and what nobody
sampled is masked."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from transformers import AutoTokenizer

from examples.calculator import prepare as calculator
from examples.guessing import prepare as guessing
from learner.recording import Recording, open_groups
from mesh.trajectory import Trajectory
from tests.integration.mesh import MeshRun, audit

_STEPS = 3
_COMMON = (
    f"--learner.steps={_STEPS}",
    "--learner.batch.groups=6",
    "--learner.optimizer.warmup_steps=1",
    "--reward.in_process=true",
    "--eval.every_steps=null",
    "--eval.stop_at=null",
    "--logging.record=true",
)


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Callable[..., MeshRun]]:
    """Runs an example to its end."""
    runs: list[MeshRun] = []

    def run(config: str, data: Path, *overrides: str) -> MeshRun:
        runs.append(MeshRun(data, tmp_path, *_COMMON, *overrides, config=config))
        assert runs[-1].finish() == 0, runs[-1].tail()
        audit(runs[-1])
        return runs[-1]

    yield run
    for started in runs:
        started.close()


def trained(run: MeshRun) -> list[Trajectory]:
    """What was trained on, as it was recorded."""
    recording = Recording(run.folder / "recording")
    batches = [recording.batch(version) for version in recording.versions]
    groups = [group for batch in batches if batch is not None for group in open_groups(batch)]
    return [trajectory for group in groups for trajectory in group.trajectories if isinstance(trajectory, Trajectory)]


def texts(data: Path, trajectory: Trajectory) -> list[tuple[bool, str]]:
    """(sampled, text), in order."""
    tokenizer = AutoTokenizer.from_pretrained(data / "model")
    mask = trajectory.response_mask
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    return [
        (bool(mask[begin]), str(tokenizer.decode(trajectory.response_ids[begin:end].tolist())))
        for begin, end in itertools.pairwise(edges)
    ]


@pytest.mark.slow
def test_calls_of_a_calculator_are_trained(
    tmp_path: Path, play: Callable[..., MeshRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    # A short warm start, of calls alone.
    monkeypatch.setattr(calculator, "_GIVEN_UP", 0.0)
    monkeypatch.setattr(calculator, "_ROWS", 60)
    calculator.main(["--out", str(data), "--warm-steps", "50"])
    run = play("examples/calculator/calculator.yaml", data)
    calls = [found for found in (texts(data, trajectory) for trajectory in trained(run)) if len(found) > 1]
    assert calls
    right = 0
    for (sampled, call), (answered, result), *_ in calls:
        assert sampled
        assert not answered
        assert "<tool_call>" in call
        assert result.startswith("<tool>")
        assert result.endswith("<end><assistant>")
        right += result.removeprefix("<tool>").removesuffix("<end><assistant>").isdigit()
    assert right
    assert all(1 < turns <= 3 for turns in run.metric("agent/turns/mean"))
    assert all(called > 0 for called in run.metric("agent/tool_calls/mean"))


@pytest.mark.slow
def test_games_are_trained(tmp_path: Path, play: Callable[..., MeshRun]) -> None:
    data = tmp_path / "data"
    guessing.main(["--out", str(data), "--warm-steps", "30"])
    run = play("examples/guessing/guessing.yaml", data)
    found = [texts(data, trajectory) for trajectory in trained(run)]
    assert max(len(game) for game in found) == 6, "three guesses, each behind something that was said"
    for (opened, opening), (guessed, _), *rest in found:
        assert not opened
        assert opening == "0-6<end><assistant>"
        assert guessed
        assert all(told.startswith("<user>") for sampled, told in rest if not sampled)
    found_it = sum(game[-1][1].endswith("<end>") and len(game) < 6 for game in found)
    assert fmean(run.metric("critic/score/mean")) >= found_it / len(found) > 0, (
        "a game that ends early has found the number"
    )
