"""Trackers and the thread that feeds them: nothing lost, nothing blocked, a broken one left out."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from rollmesh.learner.metrics import MetricsWriter, Record
from rollmesh.learner.metrics.trackers.interface import Tracker
from rollmesh.learner.metrics.trackers.local import ConsoleTracker, JsonlTracker

STEP = {
    "critic/score/mean": 0.5,
    "response_length/mean": 3.0,
    "staleness/mean": 0.0,
    "tokens_per_second": 9.0,
    "timing_s/gen": 0.1,
    "timing_s/step": 0.2,
}


class Broken(Tracker):
    def __init__(self) -> None:
        self.calls = 0

    def log(self, step: int, record: Record) -> None:
        self.calls += 1
        raise OSError("disk full")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_records_arrive_in_order_and_behind_jobs(tmp_path: Path) -> None:
    writer = MetricsWriter([JsonlTracker(tmp_path / "m.jsonl")])
    done: list[int] = []
    for step in range(50):
        writer.log(step, {"x": step})
        writer.submit(lambda: done.append(len(done)))
    writer.close()
    assert [line["step"] for line in lines(tmp_path / "m.jsonl")] == list(range(50))
    assert len(done) == 50


def test_a_broken_tracker_is_left_out_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken = Broken()
    writer = MetricsWriter([broken, JsonlTracker(tmp_path / "m.jsonl")])
    writer.log(1, {"x": 1})
    writer.log(2, {"x": 2})
    writer.close()
    assert broken.calls == 1
    assert caplog.text.count("Broken failed and is not used any more: disk full") == 1
    assert len(lines(tmp_path / "m.jsonl")) == 2


def test_jsonl_goes_on_behind_a_torn_line_and_has_no_nan(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"ste')
    tracker = JsonlTracker(path)
    tracker.log(2, {"x": float("nan"), "histogram": {"0": 3}})
    tracker.close()
    assert json.loads(path.read_text().splitlines()[-1]) == {"step": 2, "x": None, "histogram": {"0": 3}}


def test_the_console_speaks_every_so_many_steps(caplog: pytest.LogCaptureFixture) -> None:
    tracker = ConsoleTracker(every_steps=10)
    with caplog.at_level(logging.INFO):
        for step in range(1, 21):
            tracker.log(step, STEP)
        tracker.log(20, {"eval/reward": 0.75})
    spoken = [record.message.split(":")[0] for record in caplog.records]
    assert spoken == ["step 1", "step 10", "step 20", "step 20"]
    assert "held-out reward 0.750" in caplog.text


def test_the_console_has_the_accuracy_of_preferences(caplog: pytest.LogCaptureFixture) -> None:
    tracker = ConsoleTracker(every_steps=10)
    step = {"steps": 2, "actor/loss": 0.5, "actor/lr": 1e-3, "perf/throughput": 90.0}
    with caplog.at_level(logging.INFO):
        tracker.log(1, step)
        tracker.log(2, {**step, "rewards/accuracies": 0.625, "eval/loss": 0.25, "eval/rewards/accuracies": 1.0})
    assert [record.message for record in caplog.records] == [
        "step 1 of 2: loss 0.5000, lr 1.00e-03, 90 tokens/s",
        "step 2 of 2: loss 0.5000, accuracy 0.625, lr 1.00e-03, 90 tokens/s",
        "step 2: held-out loss 0.2500, accuracy 1.000",
    ]
