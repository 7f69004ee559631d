"""The views of a run: that they fit, and say what a person looks for."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console, RenderableType

from rollmesh.cli.observe.table_console import table_console
from rollmesh.launcher.console.bottleneck import Bottleneck, WaitShares
from rollmesh.launcher.console.generators_table import generators_table
from rollmesh.launcher.console.live import LiveView, run_page
from rollmesh.launcher.console.members_table import members_table
from rollmesh.launcher.console.plain import PlainView
from rollmesh.launcher.console.progress import Progress
from rollmesh.launcher.console.tables import pushes_table, status_table
from rollmesh.launcher.console.text import duration, fitted
from rollmesh.launcher.console.view import open_view
from rollmesh.launcher.mesh_client import Snapshot
from rollmesh.mesh.config import load_config
from rollmesh.protos import buffer_pb2, membership_pb2, trajectory_pb2, weights_pb2
from rollmesh.report.pushes import live_rows, transport_choices

CONFIG = load_config(
    {
        "run": {"name": "mine"},
        "model": {"path": "org/model"},
        "data": {"train": "t"},
        "algorithm": "dapo",
        "learner": {"steps": 200},
    }
)
GATE = "staleness bound: buffer.max_staleness (4) allows no further prompts before version 16; the one served is 15"


def training(step: int, seconds_per_step: float = 3.0, **values: float) -> dict[str, Any]:
    return {
        "step": step,
        "time": 1000.0 + seconds_per_step * step,
        "critic/score/mean": 0.25,
        "actor/loss": -0.0123,
        "actor/entropy": 1.5,
        "actor/k3_kl": 0.002,
        "actor/pg_clipfrac": 0.031,
        "actor/grad_norm": 0.75,
        "response_length/mean": 812.0,
        "response_length/clip_ratio": 0.1,
        "frac_reward_zero_std": 0.4,
        "staleness/mean": 1.25,
        "tokens_per_second": 900.0,
        **values,
    }


def generator(number: int, *, waits: str = "", version: int = 9) -> membership_pb2.Member:
    return membership_pb2.Member(
        member_id=f"generator-{number}-f5098efb",
        role=membership_pb2.ROLE_GENERATOR,
        address=f"10.0.0.{number % 250}:40603",
        gauges={"tokens_per_second": 100.0},
        serving=trajectory_pb2.PolicyVersion(incarnation=1, version=version),
        waiting_reason=waits,
    )


def a_run(generators: int) -> tuple[Snapshot, Progress]:
    """A run at step 40 of 200, and its snapshot."""
    records = [training(step) for step in range(1, 41)] + [
        {"step": step, "eval/reward": reward} for step, reward in ((0, 0.1), (20, 0.5), (40, 0.4))
    ]
    progress = Progress.of_run(CONFIG)
    progress.add(records)
    members = [generator(number, waits=GATE if number % 2 else "") for number in range(generators)]
    learner = membership_pb2.Member(member_id="learner", role=membership_pb2.ROLE_LEARNER)
    snapshot = Snapshot(
        table=buffer_pb2.DescribeResponse(max_staleness=4, generators_wait=GATE), members=[learner, *members]
    )
    sample = {"prompt": "What is 6 times 7?\n" * 20, "response": "[bold]42\n" * 20, "reward": 1.0}
    snapshot.follow(Snapshot(sample=sample), records)
    return snapshot, progress


def drawn(columns: int, *page: RenderableType) -> list[str]:
    console = Console(width=columns, file=io.StringIO())
    console.print(*page)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text.splitlines()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_whole_summary_is_there_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "24")
    view = open_view(CONFIG)
    assert isinstance(view, LiveView)
    for number in range(20):
        view.event(f"line {number} of the summary")
    view.event(" ".join(["word"] * 40))
    view.close()
    last = terminal.getvalue().rpartition("line 0 of the summary")[2]
    assert [f"line {number} of" in last for number in range(1, 20)] == [True] * 19
    assert sum("         word" in line for line in last.splitlines()) == 2


def test_what_members_say_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in it is markup: neither for the live view nor for `rollmesh status`."""
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("COLUMNS", "200")
    member = generator(0, waits="for [/data] :bug:")
    member.member_id = "g[/red]"
    view = open_view(CONFIG)
    view.update(Snapshot(members=[member]), [])
    view.close()
    table_console().print(members_table([member]))
    shown = terminal.getvalue()
    assert shown.count("for [/data] :bug:") >= 2
    assert shown.count("g[/red]") >= 2


def test_the_rung_of_programs_is_shown() -> None:
    member = membership_pb2.Member(
        member_id="r", role=membership_pb2.ROLE_REWARD, gauges={"reward_isolation_rung": 3.0}
    )
    assert any("programs on rung 3" in line for line in drawn(200, members_table([member])))


def test_tokens_of_generators_that_have_left_stay_in_the_total() -> None:
    lines = drawn(200, status_table(Snapshot(generated_tokens=1200.0)))
    assert "0 generated just now (1200 tokens so far)" in "\n".join(lines)


@pytest.mark.parametrize("columns", [80, 100])
def test_the_live_page_says_how_far_the_run_is_what_it_learns_and_what_to_do(columns: int) -> None:
    snapshot, progress = a_run(generators=3)
    lines = drawn(columns, run_page(CONFIG, snapshot, progress, WaitShares(0.02, 0.8, 60.0), columns))
    text = " ".join(" ".join(lines).split())
    for part in (
        "mine dapo on org/model, in runs/mine",
        "40 of 200, 8 min left",
        "0.250 in training (0.250 of late), held-out 0.400 at step 40, best 0.500 at step 20",
        "loss -0.0123, entropy 1.5, KL 0.002, clipped 3.1%, grad norm 0.75",
        "length 812.0, cut off 10%, zero variance 40%, staleness 1.25 of 4",
        "reward 1: 'What is 6 times",
        "'[bold]42",
        "waited learner 2%, generators 80% of the last 60 s",
        "to do generators wait for the learner most of the time",
    ):
        assert part in text
    assert text.count("generators wait:") == 1
    assert max(map(len, lines)) <= columns


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_a_thousand_generators_fit_and_those_that_wait_come_first(columns: int) -> None:
    snapshot, _ = a_run(generators=1000)
    lines = drawn(columns, generators_table(snapshot, columns))
    assert len(lines) == 10
    assert all("staleness bound" in line for line in lines[1:9])
    assert lines[-1].split()[:4] == ["992", "others", "v9", "99200"]
    assert "492 of them wait" in lines[-1]
    assert max(map(len, lines)) <= columns


def test_status_sums_many_generators_and_shows_those_in_trouble() -> None:
    members = [generator(number, waits=GATE if number % 2 else "") for number in range(1000)]
    members[7].heartbeat_age_ms = 60_000
    members[8].serving.version = 3
    lines = [" ".join(line.split()) for line in drawn(320, members_table(members))][1:]
    assert lines[0].startswith("generator-7-f5098efb generator 10.0.0.7:40603 version 9")
    assert lines[0].endswith(f"60.0 s {GATE}")
    assert lines[1].startswith(f"499 waits generator - v9 49900 0.0 s {GATE}")
    assert lines[2].startswith("generator-8-f5098efb generator 10.0.0.8:40603 version 3")
    assert lines[3:] == ["499 working generator - v9 49900 0.0 s -"]
    assert len(drawn(320, members_table(members, every=True))) == 1001
    for member in members:
        member.heartbeat_age_ms = 60_000
    lines = drawn(320, members_table(members))
    assert len(lines) == 17
    assert " ".join(lines[-1].split()).startswith("985 silent generator - v3-9 98500 60.0 s 2 reasons")


def test_pushes_to_many_generators_are_summed_but_for_those_that_fail() -> None:
    times = weights_pb2.Percentiles(p50=2000.0, p99=9000.0)
    receivers = [
        weights_pb2.ReceiverPushes(
            member_id=f"generator-{number}",
            count=2,
            errors=int(number == 500),
            total_us=times,
            last=weights_pb2.SwapReport(choice="grpc: another host"),
        )
        for number in range(1000)
    ]
    pushes = weights_pb2.PushesResponse(receivers=receivers)
    rows = live_rows(pushes, 16)
    assert len(rows) == 17
    assert rows[1][:3] == ["generator-500", "2", "1"]
    assert rows[-1][:3] == ["985 others, the slowest", "1970", "0"]
    assert rows[-1][7] == "2 / 9"
    assert len(live_rows(pushes)) == 1001
    [line] = transport_choices(pushes)
    assert line.endswith("generator-104 and 992 others: full versions come over grpc: another host")


@pytest.mark.parametrize("columns", [80, 100])
def test_status_fits_a_narrow_terminal(columns: int) -> None:
    snapshot, _ = a_run(generators=3)
    pushes = [["receiver", "versions", "first byte, ms"], ["generator-1-f5098efb", "12", "26.5 / 51.4"]]
    tables = (status_table(snapshot), members_table(snapshot.members, columns), pushes_table(pushes, columns))
    lines = drawn(columns, *tables)
    assert max(map(len, lines)) <= columns
    assert " ".join(lines[-1].split()) == "generator-1-f5098efb versions 12, first byte, ms 26.5 / 51.4"


def test_while_things_load_it_says_so() -> None:
    waiting = generator(0, waits="waits for a learner")
    snapshot = Snapshot(table=buffer_pb2.DescribeResponse(), members=[waiting], learner_starts=True)
    page = run_page(CONFIG, snapshot, Progress.of_run(CONFIG), None, 80)
    text = "\n".join(drawn(80, page, generators_table(snapshot, 80)))
    assert "the learner is starting" in text
    assert "waits for the learner, which is" in text
    assert "0 of 200" in text


def test_plain_lines_fit_and_say_the_same(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    view = PlainView(every_steps=10, progress=Progress.of_run(CONFIG))
    view.event(f"{GATE}; {GATE}")
    for step in range(1, 31):
        same = training(step, **{"critic/score/min": 0.25, "critic/score/max": 0.25})
        view.update(Snapshot(table=buffer_pb2.DescribeResponse()), [same])
    view.close()
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    text = " ".join(" ".join(lines).split())
    assert "step 30 of 200: reward 0.250, length 812.0" in text
    assert "loss -0.0123, entropy 1.5, KL 0.002, clipped 3.1%, grad norm 0.75" in text
    assert text.count("8 min left") == 1
    assert text.count("every response of the last 20 steps got the same reward, 0.25: nothing can be learned.") == 1


def test_words_that_are_longer_than_a_line_are_not_cut() -> None:
    path = "/very/long/path" * 12
    assert path in fitted(f"12:00:00 report: {path} is there", 100).split()


def test_the_time_left_is_that_of_recent_steps_and_begins_again_after_a_resumption() -> None:
    progress = Progress(steps=100)
    assert (progress.left_s, progress.of_steps(0)) == (None, "step 0 of 100")
    progress.add([training(step, 60.0) for step in range(1, 30)])
    progress.add([{**training(step), "time": 50000.0 + 2.0 * step} for step in range(30, 61)])
    assert progress.left_s == pytest.approx(40 * 2.0)
    progress.add([{**training(50), "time": 60000.0}])
    assert (progress.step, progress.left_s) == (50, None)
    assert [duration(seconds) for seconds in (5, 300, 9000, 400000)] == ["5 s", "5 min", "2.5 h", "4.6 days"]


def waited(learner_s: float, generators_s: float, generators: int = 2) -> Snapshot:
    table = buffer_pb2.DescribeResponse(
        waiting_for_inserts_ms=round(1000 * learner_s), waiting_for_samples_ms=round(1000 * generators_s)
    )
    return Snapshot(table=table, members=[generator(number) for number in range(generators)])


def test_shares_of_waiting_are_those_of_the_last_minute() -> None:
    bottleneck = Bottleneck()
    assert bottleneck.observe(0.0, waited(100.0, 0.0)) is None
    assert bottleneck.observe(10.0, Snapshot(trouble="away")) is None
    early = bottleneck.observe(20.0, waited(118.0, 0.0))
    assert early is not None
    assert (early.learner, early.advice) == (pytest.approx(0.9), "")
    for second in range(40, 201, 10):
        found = bottleneck.observe(float(second), waited(118.0, 1.6 * (second - 40)))
    assert found is not None
    assert (found.learner, found.generators) == (0.0, pytest.approx(0.8))
    assert "learner.ranks" in found.advice
    assert bottleneck.observe(210.0, waited(0.0, 0.0)) is None, "the buffer's clocks have begun again"
