"""Traces of chosen steps: which ranks and steps leave a file, what is in it, and what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from rollmesh.learner.distributed.step_profiler import StepProfiler
from rollmesh.mesh.config.learner import ProfileSection
from rollmesh.mesh.errors import ConfigError

CPU = torch.device("cpu")


def test_chosen_steps_of_chosen_ranks_leave_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ProfileSection(steps=(2,), ranks=(1,))
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        profiler = StepProfiler(settings, CPU, tmp_path / "profile")
        for step in (1, 2, 3):
            with profiler.step(step):
                torch.mm(torch.ones(3, 3), torch.ones(3, 3))
    (trace,) = (tmp_path / "profile").iterdir()
    assert trace.name == "step-2-rank-1.json.gz"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert sum(event.get("name") == "aten::mm" for event in events) == 1


def test_an_error_of_the_step_is_passed_on(tmp_path: Path) -> None:
    profiler = StepProfiler(ProfileSection(steps=(1,)), CPU, tmp_path)
    with pytest.raises(KeyError, match="of the step"), profiler.step(1):
        raise KeyError("of the step")
    with profiler.step(1):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["step-1-rank-0.json.gz"]


def test_a_disk_that_refuses_the_trace_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "profile").touch()
    with StepProfiler(ProfileSection(steps=(1,)), CPU, tmp_path / "profile").step(1):
        pass
    assert "cannot write" in caplog.text


def test_memory_is_recorded_on_cuda_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"learner\.profile\.memory.*runs on cpu"):
        StepProfiler(ProfileSection(memory=True), CPU, tmp_path)
