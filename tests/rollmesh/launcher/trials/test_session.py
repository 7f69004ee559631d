"""The beginning of a run of `placement: auto`: its event, and its record for `rollmesh status`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollmesh.launcher.placement.devices import DevicePlan
from rollmesh.launcher.trials import session
from rollmesh.launcher.trials.opening import opening
from rollmesh.launcher.trials.record import read_record
from rollmesh.launcher.trials.session import RunPlacement
from rollmesh.mesh.config import load_config
from rollmesh.protos import buffer_pb2


@pytest.mark.parametrize(
    ("steps", "done", "event", "text"),
    [
        (
            5,
            0,
            "placement auto: 5 steps are left, and a measurement with one trial takes 19 or more, "
            "so the run stays in turns",
            "no decision: 5 steps are left, and a measurement with one trial takes 19 or more",
        ),
        (
            19,
            0,
            "placement auto: measures 9 batches or more in turns, then tries what may be faster",
            "auto, now collocated; seconds per batch so far: none yet",
        ),
        (
            100,
            90,
            "placement auto: 10 steps are left, and a measurement with one trial takes 19 or more, "
            "so the run stays in turns",
            "no decision: 10 steps are left, and a measurement with one trial takes 19 or more",
        ),
    ],
)
def test_a_run_that_is_too_short_for_trials_says_so(
    tmp_path: Path, steps: int, done: int, event: str, text: str
) -> None:
    asked = load_config(
        {"run": {"dir": str(tmp_path), "name": "run"}, "model": {"path": "m"}, "data": {"train": "t.jsonl"}},
        ["placement=auto", f"learner.steps={steps}"],
    )
    asked.run.folder.mkdir()
    if done:
        record = {"step": done, "time": 1.0, "critic/score/mean": 0.0}
        (asked.run.folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    events: list[str] = []
    RunPlacement(asked, opening(asked), DevicePlan(), events.append).begin()
    assert events == [event]
    kept = read_record(asked.run.folder)
    assert kept is not None
    assert (kept.text, kept.mode, kept.decided) == (text, "collocated", False)


async def test_an_evaluation_is_asked_for_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    looks_at, asked = iter((5.0, 5.5, 6.0, 6.5)), list[str]()
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: next(looks_at)))

    async def describe(table: str) -> buffer_pb2.DescribeResponse:
        asked.append(table)
        return buffer_pb2.DescribeResponse(counts=buffer_pb2.LedgerCounts(generating=len(asked) % 2))

    client: Any = SimpleNamespace(describe=describe)
    looks = session._Looks(client)
    found = [(await looks.state(session.Snapshot(), {}, [])).evaluates for _ in range(4)]
    assert found == [True, True, False, False]
    assert asked == ["eval", "eval"]
