"""Whatever a function does, its item ends with a typed outcome in time, and all others are scored."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rollmesh.mesh.liveness.process_ends import survivors
from rollmesh.protos import membership_pb2, reward_pb2
from rollmesh.reward_service.call_times import CallTimes
from rollmesh.reward_service.client.client import RewardClient
from rollmesh.reward_service.outcomes import REASON_LENGTH
from rollmesh.reward_service.scoring.engine import ScoringEngine
from rollmesh.reward_service.server.server import RewardServer
from rollmesh.reward_service.workers import slot
from rollmesh.reward_service.workers.calls import Call, Unit
from rollmesh.reward_service.workers.process import WorkerProcess
from rollmesh.reward_service.workers.unit_queue import UnitQueue

pytestmark = pytest.mark.slow
HOSTILE = Path(__file__).parent / "hostile.py"
# No call takes as long. One that hangs says that it has.
_LIMIT_S = 240.0


def said(result: reward_pb2.ScoreResult) -> str:
    """The code of an error, or what was scored."""
    return result.error.code if result.HasField("error") else f"{result.scored.total:g}"


async def gone(pid: int) -> None:
    """Waits until a process has ended."""
    assert await asyncio.to_thread(survivors, [pid], 240) == set()


ENDS = {
    "hang": "timeout",
    "spin": "timeout",
    "stop": "timeout",
    "child": "timeout",
    "closefds": "crashed",
    "exit": "crashed",
    "segfault": "crashed",
    "kill": "crashed",
    "realtime": "crashed",
    "fork": "crashed",
    "interrupt": "crashed",
    "SystemExit": "exception",
    "memory": "exception",
    "recursion": "exception",
    "raise x": "exception",
    "surrogate": "exception",
    "nan": "nan",
    "text": "bad_output",
    "object": "bad_output",
    "names": "bad_output",
    "huge": "bad_output",
    "print hello": "2",
    "thread": "2",
    "loop": "2",
    "alarm": "2",
    "good": "1",
}


async def test_each_item_ends_by_itself(make_engine: Any, make_item: Any, tmp_path: Path) -> None:
    engine = make_engine("compute_score", workers=3, call_timeout_s=_LIMIT_S)
    await engine.start()
    items = []
    for number, act in enumerate(ENDS):
        argument = f" {tmp_path / 'pid'}" if act == "child" else ""
        items += [make_item(f"{number}", act + argument), make_item(f"{number} good", "good")]
    results = await engine.score(items, 240.0)
    assert {act: said(result) for act, result in zip(ENDS, results[::2], strict=True)} == ENDS
    assert [said(result) for result in results[1::2]] == ["1"] * len(ENDS), "no one else is affected"

    by_act = dict(zip(ENDS, results[::2], strict=True))
    assert "compute_score: no answer within 240 s" in by_act["spin"].error.message
    assert "exit code 3" in by_act["exit"].error.message
    assert "SIGSEGV" in by_act["segfault"].error.message
    assert "signal 40" in by_act["realtime"].error.message, "it has no name"
    # An item that would end another worker in the same way is not tried again; a fault from outside may pass.
    assert [act for act, result in by_act.items() if result.error.retryable] == ["kill"]
    assert max(len(result.error.message) for result in results) == REASON_LENGTH
    assert by_act["raise x"].error.message.endswith("(100033 characters)"), "that it is cut off is told"
    assert engine.workers.overdue == 4
    assert 7 <= engine.workers.died <= 15, "once more in a new worker; closefds perhaps once more alone as well"
    await gone(int((tmp_path / "pid").read_text()))


async def test_a_service_that_was_stopped_with_its_workers_judges_none_for_that(
    make_engine: Any, make_item: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + stopped_s)
    monkeypatch.setattr(slot, "time", clock)
    monkeypatch.setattr(slot, "_ABSENT_S", 2.0)
    looked = Mock(wraps=slot.Slot._overdue)
    monkeypatch.setattr(slot.Slot, "_overdue", lambda *arguments: looked(*arguments))
    engine = make_engine("compute_score", workers=1, call_timeout_s=_LIMIT_S)
    await engine.start()
    gate, on = tmp_path / "gate", tmp_path / "gate-on"
    for fifo in (gate, on):
        os.mkfifo(fifo)
    scored = asyncio.create_task(engine.score([make_item("slow", f"gate {gate}")], 2 * _LIMIT_S))
    await asyncio.to_thread(gate.read_text)
    stopped_s = 2 * _LIMIT_S
    # It looks again, and finds how late that is.
    before = looked.call_count
    while looked.call_count < before + 3:
        await asyncio.sleep(0.01)
    # Open for reading as well: it is written to whether or not the worker has come as far as that.
    with on.open("r+b", 0) as both_ends:
        both_ends.write(b"!")
        assert said((await scored)[0]) == "1"
    assert engine.workers.overdue == 0


async def test_an_error_that_no_one_expected_costs_no_unit(
    make_engine: Any, make_item: Any, worker_processes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine("compute_score", workers=1, call_timeout_s=_LIMIT_S)
    await engine.start()
    (first,) = worker_processes()
    broken = iter([True])

    def name(number: int) -> str:
        if next(broken, False):
            raise ArithmeticError("unexpected")
        return str(number)

    monkeypatch.setattr("rollmesh.reward_service.workers.process.signal_name", name)
    results = await engine.score([make_item("dies", "segfault"), make_item("good", "good")], 240.0)
    assert [said(result) for result in results] == ["crashed", "1"], "another worker has found out"
    await gone(first.pid)


async def test_a_group_function_loses_its_group_alone(make_engine: Any, make_item: Any) -> None:
    engine = make_engine("judge_group", workers=2, call_timeout_s=_LIMIT_S)
    texts = {"hangs": ["good", "hang"], "dies": ["exit", "good"], "lives": ["good", "good", "good"]}
    items = [
        make_item(f"{group}{n}", text, group_id=group) for group, each in texts.items() for n, text in enumerate(each)
    ]
    items.append(make_item("unreadable", "good", group_id="lives", extra_info_json="["))
    results = await engine.score(items, 240.0)
    assert [said(result) for result in results] == ["timeout"] * 2 + ["crashed"] * 2 + ["3"] * 3 + ["bad_input"]


async def test_those_that_wait_for_one_that_hangs_are_given_to_another_worker(
    make_engine: Any, make_item: Any, tmp_path: Path
) -> None:
    engine = make_engine("compute_score", workers=2, call_timeout_s=_LIMIT_S)
    gate, on, told = tmp_path / "gate", tmp_path / "gate-on", tmp_path / "told"
    for fifo in (gate, on):
        os.mkfifo(fifo)
    told.mkdir()
    # The worker has learned that calls are quick: all of these go out in one message.
    await engine.score([make_item(str(n)) for n in range(64)], 240.0)
    items = [make_item(str(n), f"gate {gate}" if n == 3 else f"tell {told / str(n)}") for n in range(64)]
    scoring = asyncio.create_task(engine.score(items, 240.0))
    await asyncio.to_thread(gate.read_text)
    while len(list(told.iterdir())) < 63:
        await asyncio.sleep(0.01)
    await asyncio.to_thread(on.write_text, "!")
    assert [said(result) for result in await scoring] == ["1"] * 64


async def test_a_call_that_ends_while_a_worker_is_busy_says_so(make_engine: Any, make_item: Any) -> None:
    engine = make_engine("compute_score", workers=1, call_timeout_s=_LIMIT_S)
    await engine.start()
    message = "not begun"
    while "a worker is still busy with it" not in message:
        (result,) = await engine.score([make_item("a", "sleep")], 0.2)
        message = result.error.message
    assert said(result) == "timeout"


def test_who_finds_no_free_worker_hears_what_the_workers_do() -> None:
    queue = UnitQueue([("f", "f")], limit=4, concurrent=False, call_timeout_s=8.0)
    assert "ended" not in queue.not_begun().message
    queue.record_duration(0, 1.5, 3)
    for _ in range(119):
        queue.record_end("signal SIGKILL", overdue=True, function=0)
    queue.record_end("signal SIGKILL", overdue=True)
    assert queue.not_begun().message.endswith(
        ", 0.5 s a call; f did not return within 8 s (reward.scorer_timeout_s), which ended 120 workers in the last "
        "16 s; the responses of such calls end without a reward"
    )


async def test_overdue_calls_of_long_ago_explain_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("rollmesh.reward_service.workers.unit_queue.time", clock)
    queue = UnitQueue([("f", "f")], limit=4, concurrent=False, call_timeout_s=8.0)
    call = Call(1, CallTimes(begin_by=1e9, deadline=1e9))
    now = 100.0
    queue.record_end("signal SIGKILL", overdue=True, function=0)
    queue.enqueue([Unit(call, 0, 0, [], queued=now)])
    now = 115.0
    assert "f did not return" in queue.present_wait().reason
    assert queue.present_wait().cause == membership_pb2.WAIT_CAUSE_REWARD_OVERDUE
    now = 116.0
    assert queue.present_wait().reason.endswith("no free worker, 0 are busy or start (reward.workers)")
    assert queue.present_wait().cause == membership_pb2.WAIT_CAUSE_UNSPECIFIED
    assert queue.overdue == 1, "the counter of the metrics stays"
    await queue.close()


async def test_an_item_that_finds_no_free_worker_says_so_and_is_not_charged(
    make_engine: Any, make_item: Any, tmp_path: Path
) -> None:
    engine = make_engine("compute_score", workers=1, call_timeout_s=_LIMIT_S)
    await engine.start()
    gate, on = tmp_path / "gate", tmp_path / "gate-on"
    for fifo in (gate, on):
        os.mkfifo(fifo)
    busy = asyncio.create_task(engine.score([make_item("busy", f"gate {gate}")], 240.0))
    await asyncio.to_thread(gate.read_text)
    waiting = asyncio.create_task(engine.score([make_item("waits")], 240.0))
    (late,) = await engine.score([make_item("late")], 0.2)
    assert said(late) == "not_begun"
    assert "no free worker" in late.error.message
    assert "reward.workers" in late.error.message
    assert late.error.retryable
    await asyncio.to_thread(on.write_text, "!")
    assert [said((await task)[0]) for task in (busy, waiting)] == ["1", "1"]


async def test_a_worker_that_is_killed_from_outside_costs_its_item_at_most(
    make_engine: Any, make_item: Any, tmp_path: Path, worker_processes: Any
) -> None:
    engine = make_engine("compute_score", workers=1, call_timeout_s=60.0)
    assert said((await engine.score([make_item()], 240.0))[0]) == "1"
    (idle,) = worker_processes()
    idle.kill()
    await gone(idle.pid)
    assert said((await engine.score([make_item()], 240.0))[0]) == "1"

    os.mkfifo(tmp_path / "busy")
    items = [make_item("busy", f"meet {tmp_path / 'busy'}"), *(make_item(str(n)) for n in range(8))]
    scoring = asyncio.create_task(engine.score(items, 240.0))
    for _ in range(2):  # in a worker that has done others before, and in one that has not
        psutil.Process(int(await asyncio.to_thread((tmp_path / "busy").read_text))).kill()
    results = await scoring
    assert [said(result) for result in results] == ["crashed"] + ["1"] * 8
    assert results[0].error.retryable


async def test_nothing_is_left_of_workers(make_engine: Any, make_item: Any, worker_processes: Any) -> None:
    def held() -> tuple[int, int]:
        return psutil.Process().num_fds(), len(worker_processes())

    engine = make_engine("compute_score", workers=1, call_timeout_s=_LIMIT_S)
    await engine.score([make_item()], 240.0)
    before = held()
    results = await engine.score([make_item(str(n), "exit" if n % 2 else "good") for n in range(12)], 240.0)
    assert [said(result) for result in results] == ["1", "crashed"] * 6
    assert said((await engine.score([make_item()], 240.0))[0]) == "1"
    assert held() == before
    await engine.close()
    assert held()[1] == 0


async def test_workers_that_die_one_after_another_are_started_ever_more_slowly(
    make_engine: Any, make_item: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    long_paused, goes_on = asyncio.Event(), asyncio.Event()

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 4:
            long_paused.set()
            await goes_on.wait()

    clock = SimpleNamespace(**vars(asyncio) | {"sleep": pause})
    monkeypatch.setattr("rollmesh.reward_service.workers.unit_queue.asyncio", clock)
    engine = make_engine("compute_score", workers=1, call_timeout_s=60.0)
    items = [*(make_item(str(n), "exit") for n in range(8)), make_item("good")]
    scoring = asyncio.create_task(engine.score(items, 480.0))
    await asyncio.wait_for(long_paused.wait(), 240)
    assert engine.workers.died == 7
    assert pauses == [0.2, 0.4, 0.8, 1.6], "the first few start at once"
    (late,) = await engine.score([make_item("late")], 0.5)
    assert said(late) == "timeout"
    assert "reward workers ended one after another, at last: exit code 3" in late.error.message
    assert "exit code 3" in engine.present_wait().reason
    goes_on.set()
    assert [said(result) for result in await scoring] == ["crashed"] * 8 + ["1"]
    assert not engine.present_wait()


async def test_calls_that_are_open_at_the_end_are_answered(
    make_engine: Any, make_item: Any, worker_processes: Any
) -> None:
    engine = make_engine("compute_score", workers=1, call_timeout_s=60.0)
    await engine.start()
    items = [make_item("a", "sleep"), make_item("b", "good"), make_item("c", "sleep")]
    scoring = [asyncio.create_task(engine.score([item], 240.0)) for item in items]
    await asyncio.sleep(0)
    await engine.close()
    assert {said((await task)[0]) for task in scoring} <= {"closed", "1"}
    assert worker_processes() == []


async def test_the_service_answers_while_all_of_its_workers_hang(make_item: Any, tmp_path: Path) -> None:
    engine = ScoringEngine([f"{HOSTILE}:compute_score"], {"easy": ["exact_match"]}, workers=1, call_timeout_s=60.0)
    server = RewardServer(engine, timeout_s=240.0)
    address = f"127.0.0.1:{await server.start()}"
    os.mkfifo(tmp_path / "busy")
    client = RewardClient([f"grpc://{address}"])
    try:
        hanging = asyncio.create_task(client.score([make_item("a", f"meet {tmp_path / 'busy'}")], timeout_s=60.0))
        worker = psutil.Process(int(await asyncio.to_thread((tmp_path / "busy").read_text)))
        async with grpc.aio.insecure_channel(address) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=60)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        (easy,) = await client.score([make_item("b", data_source="easy")], timeout_s=240.0)
        assert said(easy) == "1"
        hanging.cancel()
        worker.terminate()
    finally:
        await client.close()
        await server.stop(0)


# ---------------------------------------------------------------------------------------------- coroutines


async def test_coroutines_that_block_or_end_their_worker_end_alone(make_engine: Any, make_item: Any) -> None:
    engine = make_engine("judge", call_timeout_s=_LIMIT_S)
    acts = {"raise x": "exception", "exit": "crashed", "await 0.01": "1", "block": "timeout", "good": "1"}
    items = [make_item(act, act) for act in acts] + [make_item(str(n)) for n in range(40)]
    results = await engine.score(items, 240.0)
    assert {result.item_id: said(result) for result in results[: len(acts)]} == acts
    assert [said(result) for result in results[len(acts) :]] == ["1"] * 40


# The worker's event loop decides when these end. Their limit is a real one, and no good call is below it.
@pytest.mark.parametrize("act", ["await 600", "deaf", "block-in-task"])
async def test_coroutines_that_wait_for_ever_or_do_not_listen_end(make_engine: Any, make_item: Any, act: str) -> None:
    engine = make_engine("judge", workers=1, call_timeout_s=0.5)
    # One that stands still in a task of its own takes all others of its worker along.
    items = [make_item("a", act), *([] if act == "block-in-task" else [make_item("b")])]
    # A slow machine may need as long for a good call, which ends well another time.
    innocent = False
    while not innocent:
        result, *others = await engine.score(items, 240.0)
        assert said(result) == "timeout"
        assert result.error.retryable == (act == "await 600"), "a judge may answer another time"
        innocent = all(said(other) == "1" for other in others)
    while said((await engine.score([make_item("c")], 240.0))[0]) != "1":
        pass


async def test_coroutines_wait_together(make_engine: Any, make_item: Any) -> None:
    engine = make_engine("judge", workers=1, call_timeout_s=240.0)
    results = await engine.score([make_item(str(n), "meet-others 200") for n in range(200)], 480.0)
    assert {said(result) for result in results} == {"1"}, "each waits for all others"


# ---------------------------------------------------------------------------------------------- built-in scorers


# A worker computes until its time is up: one bomb shows it, the others are other forms of the same.
@pytest.mark.parametrize(
    "bomb",
    [
        r"9^{9^{9^{9}}}",
        *(pytest.param(more, marks=pytest.mark.exhaustive) for more in (r"7^{7^{10}}", r"(10^{8})!")),
    ],
)
async def test_numbers_that_no_one_can_compute_end_alone(
    make_engine: Any, make_item: Any, bomb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = slot.Slot._due
    began: dict[tuple[int, int], float] = {}

    def due(self: slot.Slot, worker: WorkerProcess) -> tuple[float, int | None]:
        """The time of a call is over once it has computed for a while."""
        at, busy = found(self, worker)
        if busy is None:
            return at, None
        computed = sum(psutil.Process(worker.pid).cpu_times()[:2])
        return (0.0 if computed - began.setdefault((worker.pid, busy), computed) > 0.3 else at), busy

    monkeypatch.setattr(slot.Slot, "_due", due)
    engine = make_engine("math", workers=2, call_timeout_s=_LIMIT_S)
    await engine.start()
    items = [make_item("bomb", rf"\boxed{{{bomb}}}"), *(make_item(str(n), r"\boxed{42}") for n in range(8))]
    results = await engine.score(items, 240.0)
    assert [said(result) for result in results] == ["timeout"] + ["1"] * 8
