"""The data of the panels."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollmesh.dashboard import page_data
from rollmesh.dashboard.documents import samples
from rollmesh.dashboard.documents.attention import attention_document
from rollmesh.dashboard.documents.charts import chart_document, metric_document
from rollmesh.dashboard.documents.head import head_document
from rollmesh.dashboard.documents.ledger import ledger_document
from rollmesh.dashboard.documents.mesh import generator_state, mesh_document
from rollmesh.dashboard.documents.samples import sample_document
from rollmesh.dashboard.documents.settings import compare_settings, settings_document
from rollmesh.dashboard.live import LiveMesh
from rollmesh.dashboard.page_data import PageData, Panel
from rollmesh.dashboard.panels import PANELS
from rollmesh.dashboard.report import write_report
from rollmesh.dashboard.run_reader import RunReader
from rollmesh.dashboard.run_view import RunView
from rollmesh.launcher.folder import locked
from rollmesh.protos import buffer_pb2, membership_pb2
from rollmesh.report.changes import describe_changes
from tests.report_page import read_panels
from tests.rollmesh.dashboard.runs import HOSTILE, generators, mesh_now, policy, training, write_run


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> RunView:
    return RunReader(write_run(tmp_path_factory.mktemp("runs") / "demo", 60)).view


def charts_by_name(view: RunView) -> dict[str, Any]:
    found = chart_document(view)
    assert found is not None
    return {chart["name"]: chart for chart in found["charts"]}


def test_the_head_says_what_is_trained_and_how_far_it_is(view: RunView) -> None:
    head = head_document(view)
    assert head["state"] == {"kind": "finished", "text": "finished"}
    facts = {fact["name"]: fact["text"] for fact in head["facts"]}
    assert (facts["model"], facts["algorithm"]) == ("Qwen/Qwen3-8B", "grpo")
    assert (facts["data"], facts["held out"]) == ("math.parquet", "held-out.parquet")
    assert (head["progress"]["done"], head["progress"]["planned"], head["progress"]["left_s"]) == (60, 200, None)
    values = {value["name"]: value for value in head["values"]}
    assert values["held-out reward"]["note"] == "from 0.300"
    assert 0.5 < values["training reward"]["value"] < 0.6


def test_time_is_left_while_a_run_is_in_progress(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 40)
    with locked(folder):
        head = head_document(RunReader(folder).view)
    assert head["state"] == {"kind": "running", "text": "in progress"}
    assert head["progress"]["left_s"] == 80, "160 steps of half a second"


def test_a_run_that_was_killed_is_not_what_its_former_launch_was(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 4)
    assert head_document(RunReader(folder).view)["state"]["kind"] == "finished"
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, "time": 1.0, "critic/score/mean": 1.0}) + "\n")
    assert head_document(RunReader(folder).view)["state"] == {"kind": "stopped", "text": "killed"}


def test_charts_have_what_an_engineer_looks_for(view: RunView) -> None:
    charts = charts_by_name(view)
    assert {"reward", "entropy", "kl", "grad_norm", "clip", "lengths", "signal", "ess", "gap", "waits"} <= set(charts)
    labels = [curve["label"] for curve in charts["reward"]["curves"]]
    assert labels == ["training, T = 1", "held out, greedy"], "they are sampled in different ways"
    assert charts["staleness"]["bounds"] == [{"value": 4, "label": "bound"}]
    ages = [curve["y"] for curve in charts["ages"]["curves"]]
    assert all(abs(sum(shares) - 1) < 1e-3 for shares in zip(*ages, strict=True))
    assert "value" not in charts, "there is no critic"


def test_long_runs_are_reduced() -> None:
    view = RunView("long")
    for step in range(1, 1501):
        view.steps.append(training(step))
    found = chart_document(view)
    assert found is not None
    assert len(found["axes"]["steps"]["step"]) <= 600
    assert found["axes"]["steps"]["step"][-1] == 1500
    (curve,) = next(chart for chart in found["charts"] if chart["name"] == "entropy")["curves"]
    assert len(curve["y"]) == len(curve["low"]) == len(found["axes"]["steps"]["step"])


def test_every_metric_is_there_once_with_its_meaning(view: RunView) -> None:
    found = metric_document(view)
    assert found is not None
    metrics = {metric["metric"]: metric for metric in found["metrics"]}
    assert metrics["actor/entropy"]["unit"] == "nats"
    assert metrics["actor/entropy"]["meaning"]
    assert {"time", "step", "entropy"}.isdisjoint(metrics), "aliases are the same values again"


def test_the_ledger_says_what_was_dropped_and_why(view: RunView) -> None:
    found = ledger_document(view)
    assert found is not None
    (train,) = found["tables"]
    assert train["discrepancies"] == []
    assert train["drops"][0] == {"fate": "too stale", "reason": "too old", "count": 40}
    assert train["causes"] == [{"cause": HOSTILE, "count": 1}]
    counts = buffer_pb2.LedgerCounts(admitted=5, trained=3)
    live = RunView("x", mesh=LiveMesh(table=buffer_pb2.DescribeResponse(counts=counts)))
    found = ledger_document(live)
    assert found is not None
    assert found["tables"][0]["discrepancies"] == ["admitted 5, but 3 groups are counted"]


def test_attention_is_asked_for_what_is_wrong(view: RunView) -> None:
    items = attention_document(view)["items"]
    assert [item["level"] for item in items] == ["warning", "note", "note"]
    assert items[0]["text"].startswith("8 training groups failed")
    assert any("3 of 15363 responses have no reward" in item["text"] for item in items)
    assert any(item["text"] == "generator-1 was started again (exit 1)" for item in items)
    assert attention_document(RunView("x"))["items"] == []


def test_attention_is_asked_for_rewards_that_are_all_equal() -> None:
    view = RunView("demo")
    for step in range(1, 31):
        view.steps.append(training(step, **{"critic/score/min": 0.0, "critic/score/max": 0.0}))
    assert [item["text"] for item in attention_document(view)["items"]] == [
        "every response of the last 20 steps got the same reward, 0: nothing can be learned"
    ]


def test_the_picture_of_a_thousand_generators_is_small() -> None:
    document = mesh_document(RunView("x", mesh=mesh_now(1000)))
    assert document is not None
    found = document["generators"]
    assert (found["count"], len(found["members"]), len(found["cells"])) == (1000, 8, 1000)
    assert {state["state"]: state["count"] for state in found["states"]} == {"working": 857, "waits": 142, "silent": 1}
    assert found["members"][0]["state"] == "silent", "what is wrong comes first"
    assert len(json.dumps(document)) < 20_000
    assert document["waits"].startswith("generators wait: staleness bound")
    assert document["learner"]["phase"] == "training"


@pytest.mark.parametrize(
    ("changes", "published", "state"),
    [
        ({}, policy(10), "working"),
        ({}, policy(14), "outdated"),
        ({"serving": policy(0)}, None, "working"),
        ({"waiting_reason": "no rewards"}, policy(10), "waits"),
        ({"heartbeat_age_ms": 9000, "waiting_reason": "no rewards"}, policy(10), "silent"),
        ({"gauges": {"asleep": 1.0}}, policy(90), "asleep"),
    ],
)
def test_states_of_generators(changes: dict[str, Any], published: Any, state: str) -> None:
    (member, _) = generators(2, 10)
    assert generator_state(membership_pb2.Member(**{**_fields(member), **changes}), published, 3) == state
    assert generator_state(membership_pb2.Member(), published, 3) == "starts"


def _fields(member: membership_pb2.Member) -> dict[str, Any]:
    return {
        "member_id": member.member_id,
        "role": member.role,
        "serving": member.serving,
        "gauges": dict(member.gauges),
        "heartbeat_age_ms": member.heartbeat_age_ms,
    }


def test_runs_side_by_side_differ_in_what_was_set_otherwise(tmp_path: Path) -> None:
    views = [RunReader(write_run(tmp_path / name, 4, learning_rate=lr)).view for name, lr in (("a", 1e-6), ("b", 3e-6))]
    assert compare_settings([view.config for view in views]) == [["learner.optimizer.lr 1e-06 -> 3e-06"]]
    assert compare_settings([views[0].config, None]) == [[]]
    settings = settings_document(views[1])
    assert settings is not None
    assert "lr: 3.0e-06" in settings["chosen"]
    assert describe_changes({}, {}) == []


def test_a_panel_that_has_not_changed_keeps_its_tag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("rollmesh.dashboard.page_data.time", SimpleNamespace(monotonic=lambda: now))
    folder = write_run(tmp_path / "run", 20, ended="")
    reader, data = RunReader(folder), PageData()
    data.update([reader.view])
    before = json.loads(data.index.text)["runs"][0]["panels"]
    assert set(before) <= set(PANELS)
    reader.refresh()
    data.update([reader.view])
    assert json.loads(data.index.text)["runs"][0]["panels"] == before
    with (folder / "samples.jsonl").open("a") as file:
        file.write(json.dumps({"step": 21, "reward": 1.0}) + "\n")
    reader.refresh()
    data.update([reader.view])
    assert json.loads(data.index.text)["runs"][0]["panels"] == before, "what grows with a run is made now and then"
    now += page_data._SLOW_S
    data.update([reader.view])
    after = json.loads(data.index.text)["runs"][0]["panels"]
    assert {name for name in after if after[name] != before[name]} == {"samples"}
    assert data.panel(0, "nothing") is None
    assert data.panel(7, "head") is None


def test_samples_are_the_latest_and_some_of_the_whole_run_as_many_as_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = RunReader(write_run(tmp_path / "run", 120)).view
    document = sample_document(view)
    assert document is not None
    shown = [kept["step"] for kept in document["samples"]]
    assert shown[:24] == [step for step in range(120, 108, -1) for _ in (0, 1)]
    assert len(shown) == len({(kept["step"], kept["member"]) for kept in document["samples"]})
    assert 1 in shown
    assert len({step // 15 for step in shown}) >= 8
    first = document["samples"][0]
    assert first["tokens"]["count"] == sum(length for length, *_ in first["versions"])
    monkeypatch.setattr(samples, "_MOST_IN_ALL", len(json.dumps(document["samples"][:3])))
    fewer = sample_document(view)
    assert fewer is not None
    assert fewer["samples"] == document["samples"][:3]
    monkeypatch.setattr(samples, "_MOST_IN_ALL", 10)
    least = sample_document(view)
    assert least is not None
    assert len(least["samples"]) == 1


def test_an_evaluation_is_shown_with_its_intervals_and_worst_responses(tmp_path: Path) -> None:
    metric = {"value": 0.5, "prompts": 2, "low": 0.25, "high": 0.75}
    result = {
        "name": "rl-best",
        "metrics": {"mean@2": metric},
        "by_source": {"a": {"mean@2": metric}, "b": {"mean@2": {**metric, "low": None}}},
        "prompts": {"asked": 2, "answered": 2},
        "unscored": 1,
        "response_tokens": 12.5,
        "complete": True,
        "level": 0.95,
    }
    (tmp_path / "evaluation.json").write_text(json.dumps(result))
    responses = [
        {"text": "good", "reward": 1.0, "reason": "", "tokens": 3, "finish": "stop"},
        {"text": "none", "reward": None, "reason": "timeout", "tokens": 3, "finish": "stop"},
        {"text": HOSTILE, "reward": 0.0, "reason": "", "tokens": 3, "finish": "length"},
    ]
    row = {"row": 7, "data_source": "a", "prompt": "1+1=", "ground_truth": "2", "responses": responses}
    (tmp_path / "responses.jsonl").write_text(json.dumps(row) + "\n")
    panels = read_panels(write_report(tmp_path))
    assert panels["head"]["name"] == "rl-best"
    assert panels["head"]["values"][0] == {"name": "mean@2", "value": 0.5, "form": "3", "note": "0.250 to 0.750"}
    assert panels["evaluations"]["rows"][2] == ["b", "mean@2", "0.5000", "", "2"]
    assert [sample["response"] for sample in panels["samples"]["samples"]] == [HOSTILE, "good"]
    assert {"mesh", "charts", "ledger", "settings"}.isdisjoint(panels)


def test_a_run_that_diverges_and_one_without_times_are_shown() -> None:
    records = [{"step": 1, "critic/score/mean": math.nan, "actor/loss": math.inf, "time": math.nan}]
    view = RunView("diverged")
    for record in records:
        view.steps.append(record)
    data = PageData()
    data.update([view])
    (panels,) = data.document()["panels"]
    assert panels["head"]["progress"]["last"] is None
    assert [value["name"] for value in panels["head"]["values"]] == []
    assert json.loads(Panel.of({"a": [math.nan, {"b": -math.inf}], "c": 1.5}).text) == {
        "a": [None, {"b": None}],
        "c": 1.5,
    }


@pytest.mark.parametrize(
    ("file", "text", "failed"),
    [
        ("metrics.jsonl", '{"step": null, "critic/score/mean": 1}\n{"step": 1e400}\n' + "[" * 100_000, ""),
        ("metrics.jsonl", f'{{"step": 6, "time": 1{"0" * 400}, "critic/score/mean": 0.5}}\n', ""),
        ("restarts.jsonl", '{"time": 1}\n', ""),
        ("samples.jsonl", '{"reward": 1, "step": 8, "response": "\\ud800"}\n', ""),
        ("samples.jsonl", '{"reward": 1, "step": [], "components": "x"}\n', "samples"),
        ("stalls.jsonl", '{"time": 1}\n', "attention stalls"),
    ],
)
def test_a_damaged_file_costs_its_own_panel_at_most(tmp_path: Path, file: str, text: str, failed: str) -> None:
    """The other panels are shown, the report is written, and both say what is missing."""
    folder = write_run(tmp_path / "demo", 6)
    with (folder / file).open("a", encoding="utf-8") as appended:
        appended.write(text)
    panels = read_panels(write_report(folder))
    said = [item["text"] for item in panels["attention"]["items"] if "cannot be shown" in item["text"]]
    assert [line.partition(" ")[0] for line in said] == failed.split()
    assert {"head", "charts", "ledger"} <= panels.keys()
    assert ("samples" in panels) == (failed != "samples")
