"""Metrics, summary and report from recorded files."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rollmesh.dashboard.report import write_report
from rollmesh.launcher.console.members_table import members_table
from rollmesh.launcher.console.plain import PlainView
from rollmesh.launcher.console.speed_meter import SpeedMeter
from rollmesh.launcher.console.tables import status_table
from rollmesh.launcher.folder import locked
from rollmesh.launcher.mesh_client import Snapshot
from rollmesh.launcher.mesh_log import MeshLog
from rollmesh.launcher.trials.record import Estimated, Measured, PlacementRecord
from rollmesh.learner.checkpoint.best import Best, BestCheckpoint
from rollmesh.learner.recovery.run_identity import CONFIG
from rollmesh.mesh.config import load_config, save_config
from rollmesh.mesh.errors import DataError
from rollmesh.protos import buffer_pb2, membership_pb2, trajectory_pb2
from rollmesh.report.branches import Branches
from rollmesh.report.graders import grader_versions
from rollmesh.report.memory import MemorySample, MemoryUse, peaks_from_samples, read_memory
from rollmesh.report.metrics import MetricsTail, read_metrics, surviving_records
from rollmesh.report.placement import placement_lines
from rollmesh.report.restarts import record_restart
from rollmesh.report.samples import read_samples, read_spread, sample_lines
from rollmesh.report.speed import speed_lines, speed_of
from rollmesh.report.summary import FinalState, read_summary, write_summary
from rollmesh.report.turns import PhaseChange, read_phases, share_lines, shares_text, spans, time_shares, turns_ended
from rollmesh.run_files import read_config
from tests.report_page import read_attention, read_charts, read_facts, read_panels

START = 1_000_000.0


def training(step: int, reward: float, incarnation: int = 1) -> dict[str, Any]:
    return {
        "step": step,
        "time": START + step,
        "wall_s": float(step),
        "incarnation": incarnation,
        "critic/score/mean": reward,
        "staleness/mean": 1.0,
        "staleness/max": 2,
        "staleness/histogram": {"0": 10, "2": 5},
        "tokens_per_second": 100.0,
        "total/tokens": 15 * step,
        "timing_s/gen": 0.25,
        "timing_s/update_actor": 0.5,
        "timing_s/step": 1.0,
        "push/total_ms_p50": 4.0,
        "push/total_ms_p99": 9.0,
    }


def evaluation(step: int, reward: float | None) -> dict[str, Any]:
    return {"step": step, "time": START + step, "wall_s": float(step), "eval/reward": reward}


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    config = load_config(
        {"run": {"name": "demo", "dir": str(tmp_path)}, "model": {"path": "m"}, "data": {"train": "t"}}
    )
    config.run.folder.mkdir()
    save_config(config, config.run.folder / CONFIG)
    # The evaluation of a version may be recorded after later steps.
    records = [evaluation(0, 0.1), *(training(step, step / 10) for step in range(1, 9)), evaluation(4, 0.5)]
    records += [evaluation(8, 0.9)]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (config.run.folder / "metrics.jsonl").write_text(lines)
    looks = [
        {"time": START + second, "generators": 2, "generated_tokens": 30.0 * second, "gate_wait_s": 0.5 * second}
        for second in range(-2, 9)
    ]
    (config.run.folder / "mesh.jsonl").write_text("".join(json.dumps(look) + "\n" for look in looks))
    return config.run.folder


def final_state() -> FinalState:
    counts = buffer_pb2.LedgerCounts(admitted=50, trained=40, evicted_stale=2, filtered=1, failed=3, ready=4)
    counts.reasons["failed/timeout"] = 3
    return FinalState(
        tables={"train": buffer_pb2.DescribeResponse(waiting_for_inserts_ms=1500, waiting_for_samples_ms=2500)},
        ledgers={"train": buffer_pb2.LedgerResponse(counters=counts, recounted=counts)},
        peak_memory_bytes={"learner": 300 << 20},
        wall_s=12.0,
        ended="finished",
    )


def test_models_that_reward_have_versions(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    reward: dict[str, Any] = {
        "functions": ["judge", "classifier", "none"],
        "judge": {"base_url": "http://a:1/v1", "model": "m"},
        "classifier": {"model": str(tmp_path)},
    }

    def found() -> dict[str, str]:
        return grader_versions(load_config({"model": {"path": "m"}, "data": {"train": "t"}, "reward": reward}))

    before = found()
    assert before.keys() == {"judge", "classifier", "none", "rollmesh"}
    reward["judge"]["model"] = "n"
    (tmp_path / "config.json").write_text('{"labels": 1}')
    reward["classifier"]["device"] = "cuda:3"
    after = found()
    assert (after["judge"] != before["judge"], after["classifier"] != before["classifier"]) == (True, True)
    reward["classifier"]["device"] = "cpu"
    assert found() == after


def test_summary_has_the_runs_metrics(run_folder: Path) -> None:
    for reason in ("exit", "frozen", "frozen"):
        record_restart(run_folder, "learner", reason, START)
    summary = write_summary(run_folder, read_config(run_folder), final_state())
    assert next(summary.lines()) == "ended: finished"
    assert (summary.held_out_first, summary.held_out_last, summary.steps) == (0.1, 0.9, 8)
    assert [entry["step"] for entry in summary.held_out] == [0, 4, 8]
    assert summary.training_s == 8.0
    assert summary.tokens_per_s_trained == 15.0
    assert summary.tokens_per_s_generated == 30.0
    assert summary.groups_by_fate == {"trained": 40, "evicted_stale": 2, "filtered": 1, "failed": 3, "live": 4}
    assert summary.staleness == {"0": 80, "2": 40}
    assert summary.waiting_s == {"learner_for_groups": 1.5, "generators_at_the_gate": 2.5}
    assert summary.weight_push_ms["p99"] == 9.0
    assert summary.peak_memory_mb == {"learner": 300.0}
    assert summary.restarts == {"learner": {"exit": 1, "frozen": 2}}
    assert "restarts: learner 1 (exit), learner 2 (frozen)" in list(summary.lines())
    assert summary.graders["antlr4-python3-runtime"] == "4.13.2"
    assert read_summary(run_folder) == summary
    assert (summary.checkpoint, summary.best_checkpoint) == (None, None)
    assert dict(summary) == summary.to_dict() == json.loads((run_folder / "summary.json").read_text())
    assert summary["steps"] == 8


def test_summary_names_the_checkpoints_and_how_to_export_them(run_folder: Path) -> None:
    names = ["i0001-v00000004", "i0001-v00000008"]
    for name in names:
        (run_folder / "checkpoints" / name).mkdir(parents=True)
    file = BestCheckpoint(run_folder / "checkpoints", 1)
    file.claim()
    file.keep_candidate(names[0])
    assert file.record_value(Best(names[0], 1, 4, "reward", "max", 0.5, "x"))
    summary = write_summary(run_folder, read_config(run_folder), final_state())
    newest, best = (str(run_folder / "checkpoints" / name) for name in reversed(names))
    assert (summary.checkpoint, summary.best_checkpoint) == (newest, best)
    lines = list(summary.lines())
    assert f"checkpoint: {newest}; `rollmesh export {run_folder} OUT` makes a model of it" in lines
    assert f"best checkpoint: {best}; `--checkpoint best` exports that one" in lines
    assert "balances" in "\n".join(summary.lines())


def test_the_summary_says_why_a_run_has_finished_before_its_last_step(run_folder: Path) -> None:
    (run_folder / "learner.json").write_text('{"stop_reason": "stop_at"}')
    config = read_config(run_folder)
    config = config.model_copy(update={"eval": config.eval.model_copy(update={"stop_at": 0.85})})
    summary = write_summary(run_folder, config, replace(final_state(), ended="finished"))
    assert next(summary.lines()) == "ended: finished, for the held-out reward has reached eval.stop_at (0.85)"
    assert write_summary(run_folder, config, replace(final_state(), ended="interrupted")).ended_early == ""


def test_the_summary_compares_held_out_values_that_were_measured_in_one_way(run_folder: Path) -> None:
    """After a change of rewards the first value is that of the version from which the run continued."""
    with (run_folder / "metrics.jsonl").open("a") as file:
        for step, reward in ((8, 7.0), (9, 8.0)):
            file.write(json.dumps({**evaluation(step, reward), "eval/measured_by": "otherwise"}) + "\n")
    summary = write_summary(run_folder, read_config(run_folder), final_state())
    assert (summary.held_out_first, summary.held_out_last) == (7.0, 8.0)
    assert len(summary.held_out) == 5


def test_summary_keeps_the_most_frequent_causes_of_failures(run_folder: Path) -> None:
    final = final_state()
    for group in range(12):
        final.ledgers["train"].failed.add(causes=["reward: ValueError", f"reward: other {group}", ""])
    summary = write_summary(run_folder, read_config(run_folder), final)
    causes = read_summary(run_folder).ledger["train"]["causes"]
    assert causes == summary.ledger["train"]["causes"]
    assert len(causes) == 10
    assert causes["reward: ValueError"] == 12
    (train,) = read_panels(write_report(run_folder))["ledger"]["tables"]
    assert train["causes"][0] == {"cause": "reward: ValueError", "count": 12}


def test_summary_of_a_run_that_never_trained(tmp_path: Path) -> None:
    config = load_config({"run": {"dir": str(tmp_path)}, "model": {"path": "m"}, "data": {"train": "t"}})
    config.run.folder.mkdir()
    summary = write_summary(config.run.folder, config, FinalState())
    assert (summary.steps, summary.held_out_first, summary.tokens_per_s_trained) == (0, None, None)
    save_config(config, config.run.folder / CONFIG)
    panels = read_panels(write_report(config.run.folder))
    assert {"charts", "metrics", "ledger", "samples"}.isdisjoint(panels)
    assert panels["head"]["progress"]["done"] == 0


def test_summary_and_report_say_which_members_have_no_reward(run_folder: Path) -> None:
    without = [
        {"unscored/reward_timeout": 2, "unscored_cause": "reward timeout: 8 s"},
        {"unscored/unscorable": 1, "unscored/reward_timeout": 1, "unscored_cause": "no such <test>"},
        {},
    ]
    with (run_folder / "metrics.jsonl").open("a") as file:
        for step, found in enumerate(without, start=9):
            file.write(json.dumps({**training(step, 0.9), "samples": 8, **found}) + "\n")
    summary = write_summary(run_folder, read_config(run_folder), final_state())
    codes = {"reward_timeout": 3, "unscorable": 1}
    assert summary.unscored == {"members": 28, "codes": codes, "cause": "no such <test>"}
    text = "4 of 28 responses have no reward (reward_timeout 3, unscorable 1); newest cause: no such <test>"
    assert text in list(read_summary(run_folder).lines())
    assert text in read_attention(write_report(run_folder))


def branching(step: int, rewritten: float, repeated: float = 0.0) -> dict[str, Any]:
    """A step of eight episodes of three trained turns each."""
    turns = {"turns": 3.0, "turns_dropped": rewritten + repeated, "turns_dropped_rewritten": rewritten}
    found = turns | {"turns_dropped_repeated": repeated}
    return training(step, 0.9) | {"samples": 8} | {f"agent/{name}/mean": value for name, value in found.items()}


MANY = "41 % of turns are branches, which are not trained: the client rewrites assistant messages; see docs/endpoint.md"


def test_summary_and_report_say_which_turns_are_not_trained_and_why(run_folder: Path) -> None:
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(branching(step, 2.125)) + "\n" for step in (9, 10))
    summary = write_summary(run_folder, read_config(run_folder), final_state())
    assert summary.branches == {"turns": 48, "causes": {"rewritten": 34}}
    assert any(line.startswith(MANY) for line in read_summary(run_folder).lines())
    assert any(text.startswith(MANY) for text in read_attention(write_report(run_folder)))


def test_few_branches_are_a_line_of_the_summary_alone() -> None:
    few, many = Branches.of([branching(1, 0.0, 0.1)]), Branches.of([branching(1, 0.1, 0.2), training(2, 0.5)])
    assert few.text.startswith("3 % of turns are branches, which are not trained: the client asks the same again; see")
    assert not few.warning
    assert many.warning.startswith("9 % of turns are branches, which are not trained: the client asks the same again ")
    assert "(and 1 other reason)" in many.warning
    assert not Branches.of([training(1, 0.5)]).text, "an agent without sessions has no branches"
    assert Branches.from_wire(Branches().to_wire()) == Branches()


def test_plain_lines_say_once_that_turns_are_not_trained(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    view = PlainView(every_steps=1)
    for step in range(1, 4):
        view.update(Snapshot(table=buffer_pb2.DescribeResponse()), [branching(step, 2.125)])
    view.close()
    assert capsys.readouterr().out.count(MANY) == 1


def test_summary_and_report_say_which_groups_failed_and_why(run_folder: Path) -> None:
    """Where every member of a prompt has no reward, no trained group has one without."""
    final = final_state()
    final.ledgers["train"].counters.reasons["filtered/zero_variance"] = 5
    final.ledgers["eval"] = buffer_pb2.LedgerResponse()
    final.ledgers["eval"].counters.reasons["failed/too_few_scored"] = 1
    for cause in ("reward: exception: no <such> prompt", "reward: exception: no <such> prompt", "reward: timeout"):
        final.ledgers["eval"].failed.add(causes=[cause])
    write_summary(run_folder, read_config(run_folder), final)
    train = "3 training groups failed (timeout 3); see `rollmesh ledger --failed`"
    held_out = "1 evaluation group failed (too_few_scored 1); mostly: reward: exception: no <such> prompt"
    lines = list(read_summary(run_folder).lines())
    assert [line for line in lines if "failed" in line.replace("failed 3", "")] == [train, held_out]
    report = write_report(run_folder)
    assert {train, held_out} <= set(read_attention(report))
    assert "<such>" not in report.read_text(encoding="utf-8"), "texts of a run are no HTML"


def test_lines_say_which_groups_failed_and_which_answers_were_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    view = PlainView(every_steps=1)
    for step, failed in enumerate((0, 2, 2, 3), start=1):
        described = buffer_pb2.DescribeResponse()
        if failed:
            described.counts.reasons["failed/too_few_scored"] = failed
        view.update(Snapshot(table=described), [training(step, 0.5)])
    for missing in (0, 8):
        view.update(Snapshot(), [{**evaluation(4, 0.98), "eval/scored": 56, "eval/failed": missing}])
    view.close()
    lines = capsys.readouterr().out.splitlines()
    said = [line.partition(" ")[2] for line in lines[:6] if "failed" in line]
    assert said == [
        f"{failed} training groups failed (too_few_scored {failed}); see `rollmesh ledger --failed`"
        for failed in (2, 3)
    ]
    assert [line.partition("held-out ")[2] for line in lines[6:]] == [
        "reward 0.980",
        "reward 0.980 (8 of 64 responses have no reward and are left out)",
    ]


def test_a_run_that_failed_before_its_first_step_has_a_report_that_says_why(run_folder: Path) -> None:
    (run_folder / "metrics.jsonl").unlink()
    final = final_state()
    final.ended = "error stalled: nothing has moved for 60 s"
    summary = write_summary(run_folder, read_config(run_folder), final)
    assert (summary.ended, summary.steps, summary.tokens_per_s_generated) == (final.ended, 0, None)
    report = write_report(run_folder)
    assert read_panels(report)["head"]["state"] == {"kind": "failed", "text": final.ended}
    assert read_charts(report) == {"throughput", "waits"}


@pytest.mark.parametrize("looks", [[], [0.0, 0.0], [0.0, 5.0]])
def test_tokens_that_were_trained_were_sampled_whoever_has_seen_it(run_folder: Path, looks: list[float]) -> None:
    """15 a step in 8 steps of a second; the generators' last report came before their last tokens."""
    lines = [json.dumps({"time": START, "generated_tokens": tokens}) + "\n" for tokens in looks]
    (run_folder / "mesh.jsonl").write_text("".join(lines))
    assert write_summary(run_folder, read_config(run_folder), final_state()).tokens_per_s_generated == 15.0


def test_the_speed_of_a_line_is_that_between_reports() -> None:
    speed = SpeedMeter()
    assert speed.since_last() is None
    for now, tokens in ((0.0, 500.0), (60.0, 500.0), (61.0, 600.0), (61.5, 600.0)):
        speed.observe(now, tokens)
    assert speed.since_last() == 100.0, "of an earlier launch and the time before the first token nothing counts"
    speed.observe(61.9, 600.0)
    assert speed.since_last() == 100.0, "nothing was reported since"
    speed.observe(63.0, 1000.0)
    assert speed.since_last() == 200.0
    speed.observe(70.0, 1000.0)
    assert speed.since_last() == 0.0, "nothing was reported for long"


def test_tokens_count_that_were_sampled_between_two_looks(run_folder: Path) -> None:
    """However short the run was."""
    looks = [{"time": START - 1, "generated_tokens": 0.0}, {"time": START + 9, "generated_tokens": 160.0}]
    (run_folder / "mesh.jsonl").write_text("".join(json.dumps(look) + "\n" for look in looks))
    assert write_summary(run_folder, read_config(run_folder), final_state()).tokens_per_s_generated == 20.0


def test_report_is_one_file_with_its_plots(run_folder: Path) -> None:
    write_summary(run_folder, read_config(run_folder), final_state())
    sample = {"step": 3, "prompt": "1+1=", "response": "<b>2</b>", "reward": 1.0, "ground_truth": "2"}
    (run_folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    report = write_report(run_folder)
    assert {"reward", "staleness", "ages", "phases", "pushes", "throughput", "waits"} <= read_charts(report)
    panels, page = read_panels(report), report.read_text(encoding="utf-8")
    outside = re.findall(r"""(?:src|href)=["'](?!#)[^"']*""", page)
    assert outside == []
    assert "<b>2</b>" not in page
    assert panels["samples"]["samples"][0]["response"] == "<b>2</b>"
    held_out = next(value for value in panels["head"]["values"] if value["name"] == "held-out reward")
    assert (held_out["value"], held_out["note"]) == (0.9, "from 0.100")


def test_the_report_shows_turns_on_shared_devices(run_folder: Path) -> None:
    swaps = {"placement/to_training_s": 1.5, "placement/freezing_s": 0.5, "placement/onloading_s": 1.0}
    totals = {"placement/swap_share": 0.125, "placement/turns": 3.0, "placement/taken_back": 1.0}
    records = [training(step, 0.5) | swaps | totals for step in range(1, 4)]
    (run_folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for second, phase in ((1, "generating"), (2, "freezing"), (3, "training"), (4, "offloading"), (5, "generating")):
        change = {"unix_s": START + second, "turn": 1, "phase": phase, "reason": ""}
        with (run_folder / "turns.jsonl").open("a") as file:
            file.write(json.dumps(change) + "\n")
    uses = {"learner": MemoryUse(300 << 20, 10 << 20), "generator-0": MemoryUse(200 << 20)}
    samples = [MemorySample(START + second + 0.5, uses) for second in range(6)]
    (run_folder / "memory.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for sample in samples for line in sample.lines())
    )
    peaks = peaks_from_samples(read_memory(run_folder), read_phases(run_folder))
    final = final_state()
    final.memory_by_phase_mb = peaks.to_mib()
    summary = write_summary(run_folder, read_config(run_folder), final)
    assert read_summary(run_folder) == summary
    assert list(summary.memory_by_phase_mb) == ["generating", "freezing", "training", "offloading"]
    assert summary.memory_by_phase_mb["training"]["learner"] == {"anon": 300.0, "shared": 10.0, "device": 0.0}
    assert summary.memory_by_phase_mb["training"]["all"] == {"anon": 500.0, "shared": 0.0, "device": 0.0}
    highest = "generating 0.49, freezing 0.49, training 0.49, offloading 0.49"
    assert f"peak memory of all services by phase, GiB of their own: {highest}" in list(summary.lines())
    swaps, share = (
        "to training 1.50 s (freezing 0.50, onloading 1.00)",
        "swaps 12.5% of the time in 3 turns, 1 taken back",
    )
    assert f"shared devices before it was split: {swaps}; {share}" in list(summary.lines())
    summary.placement["mode"] = "collocated"
    assert f"shared devices: {swaps}; {share}" in list(summary.lines())
    report = write_report(run_folder)
    facts = read_facts(report)
    assert facts["placement"] == f"split; {share}"
    assert facts["swaps of shared devices"] == swaps
    assert read_panels(report)["memory"]["rows"][2][-2:] == ["300 + 10 shared", "500"]
    assert list(spans(read_phases(run_folder), START + 9)) == [
        (START + 1, START + 2, "generating"),
        (START + 2, START + 3, "swap"),
        (START + 3, START + 4, "training"),
        (START + 4, START + 5, "swap"),
        (START + 5, START + 9, "generating"),
    ]


def test_the_time_of_each_side_counts_from_the_second_turn_of_each_learner(tmp_path: Path) -> None:
    log = [
        *((0, 1, "training"), (50, 1, "generating"), (60, 1, "freezing"), (61, 2, "training"), (63, 2, "offloading")),
        *((64, 2, "generating"), (66, 2, "freezing"), (67, 3, "training")),
        *((500, 1, "training"), (540, 1, "freezing"), (541, 2, "training"), (544, 2, "generating")),
    ]
    phases = [PhaseChange(float(second), turn, phase, "") for second, turn, phase in log]
    assert time_shares(phases[:2], 55.0) == {}
    # Training 2 + 3 s, swaps 2 s, generating 2 + 1 s; the third turn of the first learner has no known end.
    shares = time_shares(phases, 545.0)
    assert shares == {"generating_share": 0.3, "training_share": 0.5, "swap_share": 0.2}
    expected = "generating 30.0%, training 50.0%, swaps 20.0%"
    assert shares_text(shares) == expected
    assert list(share_lines(shares | {"turns": 3.0})) == [f"{expected} of the time in 3 turns"]


def test_the_time_of_turns_ends_with_the_last_step_in_turns(run_folder: Path) -> None:
    log = [(0, 2, "training"), (2, 2, "generating"), (4, 3, "training")]
    for second, turn, phase in log:
        with (run_folder / "turns.jsonl").open("a") as file:
            file.write(json.dumps({"unix_s": START + second, "turn": turn, "phase": phase, "reason": ""}) + "\n")
    in_turns = [training(1, 0.5) | {"time": START + 6, "placement/turns": 3.0}]
    split = [training(step, 0.5) | {"time": START + 100 * step} for step in (2, 3)]
    (run_folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in (*in_turns, *split)))
    swaps = write_summary(run_folder, read_config(run_folder), final_state()).swaps
    assert swaps["generating_share"] == pytest.approx(2 / 6)
    assert swaps["training_share"] == pytest.approx(4 / 6)
    assert turns_ended(split) == 0.0


def test_the_report_says_what_auto_chose_and_why() -> None:
    record = PlacementRecord(
        mode="split",
        asked="auto",
        name="split, 1 of 2 cores for the learner",
        decided=True,
        step=24,
        estimates=(Estimated("split", 0.5, 0.9), Estimated("hybrid", 0.7, None)),
        measured=(Measured("collocated", 0.81, 8), Measured("split, 1 of 2 cores for the learner", 0.6, 8)),
        left_out=("hybrid, 3 of 4 devices for the learner: no room",),
    )
    assert list(placement_lines(record.to_summary())) == [
        "split (asked for: auto)",
        "auto chose split, 1 of 2 cores for the learner at step 24; seconds per batch: collocated 0.81 s, split, 1 of "
        "2 cores for the learner 0.6 s",
        "estimated seconds per batch: split 0.5 to 0.9, hybrid 0.7 or more",
        "not possible: hybrid, 3 of 4 devices for the learner: no room",
    ]
    assert list(placement_lines(PlacementRecord("hybrid", "hybrid").to_summary())) == ["hybrid"]
    assert not list(placement_lines({}))


@pytest.mark.parametrize(
    ("ended", "evaluated", "told"),
    [
        ("interrupted", 4, "with --learner.steps=8 it does only that"),
        ("error starved: no groups", 4, "the run ended before its evaluation"),
        ("finished", 4, "its evaluation has failed, and learner.log says why"),
        ("finished", 8, ""),
        ("interrupted", 8, ""),
        ("", 4, ""),
    ],
)
def test_a_last_step_without_a_held_out_reward_is_told(run_folder: Path, ended: str, evaluated: int, told: str) -> None:
    config = read_config(run_folder)
    with_data = config.model_copy(update={"data": config.data.model_copy(update={"eval": Path("e.jsonl")})})
    records = [*(training(step, 0.5) for step in range(1, 9)), evaluation(evaluated, 0.5)]
    (run_folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    final = final_state()
    final.ended = ended
    summary = write_summary(run_folder, with_data, final)
    assert summary.not_evaluated.startswith("step 8 has no held-out reward: ") == bool(told)
    assert told in summary.not_evaluated
    assert not told or summary.not_evaluated in list(summary.lines())
    at = "" if evaluated == 8 else " (at step 4)"
    assert f"held-out reward 0.500 -> 0.500{at} in 8 steps" in list(summary.lines())
    if told.startswith("with"):
        assert summary.not_evaluated in read_attention(write_report(run_folder))
    assert not write_summary(run_folder, config, final).not_evaluated, "without held-out data"


def test_the_report_shows_the_way_of_the_weights_to_each_generator(run_folder: Path) -> None:
    receivers = {
        "gen-1": {
            "count": 8,
            "errors": 1,
            "total_ms_p50": 4.0,
            "total_ms_p99": 8.5,
            "last": {
                "version": "1:8",
                "transport": "grpc",
                "encoding": "delta",
                "source": "10.0.0.7:5",
                "choice": "grpc (not shm: the learner is on another host)",
                "bytes": 2_500_000,
            }
            | {"first_byte_ms": 1.25, "total_ms": 6.5},
            "last_error": {"version": "1:7", "error": "bucket 0 is <damaged>"},
        }
    }
    (run_folder / "learner.json").write_text(json.dumps({"pushes": {"receivers": receivers}}))
    write_summary(run_folder, read_config(run_folder), final_state())
    everyone, only = read_panels(write_report(run_folder))["pushes"]["rows"]
    assert only[3] == "1:8: 2.5 MB delta over grpc from 10.0.0.7:5"
    assert only[7] == "6.5 (4 / 8.5)"
    assert only[-2:] == ["1:7: bucket 0 is <damaged>", "grpc (not shm: the learner is on another host)"]
    assert everyone[7] == "4 / 9", "all together, from the metrics"
    (run_folder / "learner.json").write_text("{")
    assert "pushes" not in read_panels(write_report(run_folder))


def test_report_of_a_run_in_progress(run_folder: Path) -> None:
    with locked(run_folder):
        panels = read_panels(write_report(run_folder))
    assert panels["head"]["state"] == {"kind": "running", "text": "in progress"}
    assert panels["charts"]["charts"]
    assert panels["head"]["progress"]["left_s"] == 92, "8 of 100 steps in a second each"


def test_report_needs_metrics(run_folder: Path) -> None:
    (run_folder / "metrics.jsonl").unlink()
    with pytest.raises(DataError, match="no metrics yet"):
        write_report(run_folder)


def test_steps_trained_again_replace_the_discarded_ones() -> None:
    first = [evaluation(0, 0.1), training(1, 0.1), training(2, 0.2), evaluation(2, 0.2), training(3, 0.3)]
    second = [training(2, 0.25, incarnation=2), training(3, 0.35, incarnation=2)]
    kept = surviving_records([*first, *second])
    assert [(record["step"], record.get("incarnation")) for record in kept] == [(0, None), (1, 1), (2, 2), (3, 2)]


def test_tail_leaves_the_line_being_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.read() == []
    path.write_text('{"step": 1}\n{"st')
    assert tail.read() == [{"step": 1}]
    with path.open("a") as file:
        file.write('ep": 2}\nnot json\n')
    assert tail.read() == [{"step": 2}]
    assert tail.read() == []


def test_mesh_log_totals_never_fall(tmp_path: Path) -> None:
    def look(**tokens: float) -> Snapshot:
        members = [
            membership_pb2.Member(
                member_id=name, role=membership_pb2.ROLE_GENERATOR, gauges={"tokens_generated": count}
            )
            for name, count in tokens.items()
        ]
        return Snapshot(table=buffer_pb2.DescribeResponse(), members=members)

    log = MeshLog(tmp_path, pytest.fail)
    log.add(look(a=100, b=50), 1.0)
    log.add(look(a=120, c=10), 2.0)
    log.add(Snapshot(trouble="away"), 3.0)
    MeshLog(tmp_path, pytest.fail).add(look(d=5), 4.0)
    assert [line["generated_tokens"] for line in read_metrics(tmp_path / "mesh.jsonl")] == [150, 180, 185]


def test_plain_lines_say_the_speed_and_what_is_without_a_reward_since_the_line_before(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    view = PlainView(every_steps=2)
    lost = {"samples": 3, "unscored/reward_timeout": 1, "unscored_cause": "reward timeout: 8 s"}
    updates = [(0, 0, []), (50, 0, []), (51, 100, [lost]), (60, 1000, [{}]), (61, 1000, [{}]), (70, 1200, [{}])]
    clock = START
    monkeypatch.setattr("rollmesh.launcher.console.plain.time.monotonic", lambda: clock)
    for step, (seconds, tokens, records) in enumerate(updates, start=-1):
        clock = START + seconds
        found = [{**training(step, 0.5), **record} for record in records]
        view.update(Snapshot(table=buffer_pb2.DescribeResponse(), generated_tokens=tokens), found)
    view.close()
    first, unscored, second = capsys.readouterr().out.splitlines()
    assert "tokens/s 100 generated 100 trained" in first, "since the first token"
    assert unscored.endswith(" 1 of 4 responses have no reward (reward_timeout 1); newest cause: reward timeout: 8 s")
    assert "tokens/s 20 generated" in second
    assert "reward_timeout" not in second


def test_one_look_shows_what_the_learner_says_now() -> None:
    gauges = {"critic/score/mean": 0.5, "eval/reward": 0.25, "staleness/mean": 1.5, "tokens_per_second": 90.0}
    members = [
        membership_pb2.Member(member_id="learner", role=membership_pb2.ROLE_LEARNER, gauges=gauges),
        membership_pb2.Member(
            member_id="generator-0",
            role=membership_pb2.ROLE_GENERATOR,
            gauges={"tokens_generated": 1234.0},
            serving=trajectory_pb2.PolicyVersion(incarnation=1, version=16),
        ),
    ]
    console = Console(width=200)
    with console.capture() as shown:
        console.print(
            status_table(Snapshot.of(buffer_pb2.DescribeResponse(), membership_pb2.ListResponse(members=members)))
        )
    rows = [" ".join(line.split()) for line in shown.get().splitlines()]
    assert "reward 0.500 in training" in rows
    assert "held-out 0.250" in rows
    with console.capture() as shown:
        console.print(members_table(members))
    assert [line.split()[2:6] for line in shown.get().splitlines()[1:]] == [
        ["-", "-", "90", "0.0"],
        ["-", "version", "16", "(incarnation"],
    ]
    assert "tokens/s 0 generated just now (1234 tokens so far), 90 trained" in rows


def test_samples_latest_and_worst(tmp_path: Path) -> None:
    rewards = [0.5, 0.0, 1.0]
    lines = [json.dumps({"step": step, "prompt": "p", "response": "r", "reward": r}) for step, r in enumerate(rewards)]
    (tmp_path / "samples.jsonl").write_text("\n".join([*lines, '{"torn']))
    assert [sample["step"] for sample in read_samples(tmp_path, worst=False, number=2)] == [2, 1]
    assert [sample["reward"] for sample in read_samples(tmp_path, worst=True, number=2)] == [0.0, 0.5]
    assert "reward 0.5" in next(sample_lines(read_samples(tmp_path, worst=True, number=2)[1]))


@given(steps=st.integers(1, 40), per_step=st.integers(1, 5), places=st.integers(1, 9), width=st.integers(0, 300))
def test_samples_of_steps_that_are_spread_over_the_run(steps: int, per_step: int, places: int, width: int) -> None:
    with TemporaryDirectory() as folder:
        kept = [
            {"step": step, "member": member, "reward": 0.0, "response": "x" * (step * width % 299)}
            for step in range(1, steps + 1)
            for member in range(per_step)
        ]
        Path(folder, "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in kept))
        found = read_spread(Path(folder), places)
    shown = list(dict.fromkeys(sample["step"] for sample in found))
    assert shown[-1] == 1
    assert shown == sorted(shown, reverse=True)
    # Whole steps, some perhaps from two places.
    for step in shown:
        assert [s["member"] for s in found if s["step"] == step][:per_step] == list(range(per_step))


def test_a_sample_in_words_tells_versions_and_gap(tmp_path: Path) -> None:
    tokens = {"count": 3, "log_probs": [-1.0, [2, None]], "policy_log_probs": [-1.5, -2.0, None]}
    sample = {"step": 1, "reward": 0.5, "versions": [[1, 1, 4], [2, 1, 5]], "tokens": tokens}
    words = "  tokens:   3; of 1:4 (1), 1:5 (2); log-prob gap 0.5000 in the mean, 0.5000 at most"
    assert list(sample_lines(sample))[1] == words
    with pytest.raises(DataError, match="no samples in"):
        read_spread(tmp_path, 2)


def test_a_single_look_counts_members_without_a_reward_as_generators_do() -> None:
    def generator(scored: float, failed: float) -> membership_pb2.Member:
        gauges = {"members_scored": scored, "members_failed": failed, "members_unscorable": 1.0}
        return membership_pb2.Member(role=membership_pb2.ROLE_GENERATOR, gauges=gauges)

    snapshot = Snapshot(members=[generator(40, 7), generator(50, 0)])
    assert snapshot.without_reward().startswith("9 of 99 responses have no reward (error 7, unscorable 2)")
    snapshot.unscored.add([training(1, 0.5) | {"samples": 8, "unscored/timeout": 2, "unscored_cause": "late"}])
    assert snapshot.without_reward() == "2 of 10 responses have no reward (timeout 2); newest cause: late"
    assert Snapshot(members=[membership_pb2.Member(role=membership_pb2.ROLE_GENERATOR)]).without_reward() == ""


def test_speed_is_the_median_of_the_steps_and_memory_the_largest() -> None:
    steps = [
        {"timing_s/update/actor": seconds, "perf/mfu/actor": 0.4, "perf/max_rss_gb": seconds, "timing_s/step": 9.0}
        for seconds in (1.0, 5.0, 2.0)
    ]
    speed = speed_of([{"timing_s/step": 1.0}, *steps])
    assert speed == {"timing_s/update/actor": 2.0, "perf/mfu/actor": 0.4, "perf/max_rss_gb": 5.0}
    assert list(speed_lines(speed)) == ["actor update 2 s", "actor MFU 40.0%", "host memory of a rank 5.00 GiB"]


def test_a_sample_is_shown_with_its_source_and_evidence() -> None:
    sample = {"step": 1, "reward": 0.5, "data_source": "my/chat", "evidence": "judge: 5: it is kind"}
    lines = list(sample_lines(sample))
    assert (lines[0].endswith("my/chat"), lines[-1]) == (True, "  evidence: 'judge: 5: it is kind'")
