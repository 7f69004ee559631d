"""Worker processes from start to end: what cannot be loaded, where output goes, who dies with it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollmesh.mesh.errors import RewardError
from rollmesh.mesh.liveness.process_ends import survivors
from rollmesh.protos import reward_pb2
from rollmesh.reward_service.outcomes import Failed, Scored, SpanValue, Unscorable
from rollmesh.reward_service.workers.messages import ANSWER_BYTES, DONE, READY, pack, pack_answer, unpack_answer
from rollmesh.reward_service.workers.process import WorkerProcess
from rollmesh.reward_service.workers.shared_page import SharedPage
from tests.repository import REPOSITORY
from tests.reward_service.workers.hostile import FORGED

OWNER = """
import asyncio, sys
from rollmesh.protos import reward_pb2
from rollmesh.reward_service.scoring.engine import ScoringEngine

async def main():
    engine = ScoringEngine([sys.argv[1] + ":compute_score"])
    await engine.start()
    item = reward_pb2.ScoreItem(item_id="a", response=sys.argv[2], ground_truth_json="1", extra_info_json="{}")
    (result,) = await engine.score([item], 240.0)
    print("scored", result.scored.total)
    await engine.close()

asyncio.run(main())
"""


def owner(response: str) -> subprocess.Popen[str]:
    """A program of its own that scores one item with `hostile.py`."""
    hostile = Path(__file__).parent / "hostile.py"
    return subprocess.Popen(
        [sys.executable, "-c", OWNER, str(hostile), response],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "ROLLMESH_JOIN": "a secret", "OF_THE_USER": "kept"},
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import nothing_of_that_name\n", "importing it raised ModuleNotFoundError"),
        ("import os; os._exit(5)\n", "ended while it loaded score: exit code 5"),
        ("def scor(items): pass\n", "did you mean 'scor'"),
        ("def score(text): pass\n", "no known signature"),
    ],
)
async def test_a_function_that_cannot_be_loaded_is_named_at_the_start(
    make_engine: Any, worker_processes: Any, tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(RewardError, match=words):
        await make_engine(f"{tmp_path}/mine.py:score").start()
    assert worker_processes() == []


async def test_a_module_that_hangs_while_it_is_imported(
    make_engine: Any, worker_processes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollmesh.reward_service.workers.process._LOAD_S", 0.5)
    (tmp_path / "mine.py").write_text("import time; time.sleep(600)\n")
    with pytest.raises(RewardError, match=r"not loaded score within 0\.5 s"):
        await make_engine(f"{tmp_path}/mine.py:score").start()
    assert worker_processes() == []


async def test_what_takes_longer_to_load_than_a_call_may_take_is_loaded_once(
    make_engine: Any, make_item: Any, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "loaded")
    (tmp_path / "mine.py").write_text(
        f"open({str(tmp_path / 'loaded')!r}).read()\ndef score(solution_str, ground_truth): return 5.0\n"
    )
    engine = make_engine(f"{tmp_path}/mine.py:score", workers=1)
    for _ in range(3):
        (early,) = await engine.score([make_item()], 0.2)
        assert "its worker still starts" in early.error.message
    # One import waits at the other end, and no other ever comes.
    await asyncio.to_thread((tmp_path / "loaded").write_text, "go")
    (scored,) = await engine.score([make_item()], 240.0)
    assert scored.scored.total == 5.0


async def test_a_file_that_breaks_later_is_told_to_those_that_wait(
    make_engine: Any, make_item: Any, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("import os\ndef score(solution_str, ground_truth): os._exit(9)\n")
    engine = make_engine(f"{mine}:score", workers=1)
    await engine.start()
    mine.write_text("1 / 0\n")
    scoring = asyncio.create_task(engine.score([make_item("dies"), make_item("waits")], 240.0))
    async with asyncio.timeout(240):
        while "importing it raised ZeroDivisionError" not in engine.present_wait().reason:
            await asyncio.sleep(0.05)
    mine.write_text("def score(solution_str, ground_truth): return 4.0\n")
    dies, waits = await scoring
    assert dies.error.code == "crashed"
    assert waits.scored.total == 4.0


def test_what_a_function_prints_goes_to_standard_error() -> None:
    process = owner("print hello")
    out, err = process.communicate(timeout=240)
    assert out == "scored 2.0\n"
    assert "hello\n" in err
    assert "and by number\n" in err


def test_workers_end_with_their_owner_and_know_no_secret_of_its_environment(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "busy")
    process = owner(f"meet {tmp_path / 'busy'}")
    worker = psutil.Process(int((tmp_path / "busy").read_text()))
    assert worker.ppid() == process.pid
    environment = worker.environ()
    assert "ROLLMESH_JOIN" not in environment
    assert environment["OF_THE_USER"] == "kept"
    process.kill()
    process.communicate(timeout=120)
    assert survivors([worker.pid], 240) == set()


def test_the_page_says_what_and_since_when() -> None:
    mine, descriptor = SharedPage.create()
    its = SharedPage(descriptor)
    os.close(descriptor)
    assert mine.unit is None
    its.begin(7)
    began = mine.began
    assert mine.unit == 7
    its.idle()
    its.begin(8)
    assert mine.began >= began > 0
    assert its.recalled == -1
    mine.recall(7)
    assert its.recalled == 7
    mine.close()
    its.close()


def test_answers_survive_and_are_bounded() -> None:
    outcomes = [
        Scored(1.5, {"part": 2.0}, [0.5], [], "grounds", 0.25, cached=True),
        Scored(1.5, {}, [], [SpanValue(0, 2, 0.5, turn=1, of_total=True)]),
        Unscorable("why"),
        Failed("code", "message", retryable=True, retry_after_s=2.0),
    ]
    assert unpack_answer(pack_answer(outcomes)) == outcomes
    answers = [unpack_answer(pack_answer([Scored(1.0, answer=answer)]))[0] for answer in ("1/2", "", None)]
    assert [found.answer for found in answers if isinstance(found, Scored)] == ["1/2", "", None]
    (huge,) = unpack_answer(pack_answer([Scored(1.0, {}, [0.0] * (ANSWER_BYTES // 8))]))
    assert isinstance(huge, Failed)
    (odd,) = unpack_answer(pack_answer([Scored(1.0, {"part": object()})]))  # type: ignore[dict-item]
    assert isinstance(odd, Failed)
    assert odd.code == "bad_output"


@pytest.mark.parametrize("form", FORGED)
async def test_what_is_no_answer_ends_the_connection_whatever_is_wrong_with_it(form: str) -> None:
    page, descriptor = SharedPage.create()
    os.close(descriptor)
    worker = WorkerProcess(subprocess.Popen(["sleep", "600"], start_new_session=True), page, ["f"])
    try:
        worker.data_received(pack([READY, [[False, False]]]))
        worker.data_received(pack([DONE, [[0, None]]]))
        assert worker.read_answers() == [(0, None)]
        assert not worker.lost
        worker.data_received(FORGED[form])
        assert worker.lost
        assert worker.read_answers() == []
    finally:
        ending = await worker.end()
    assert (ending.nonsense, ending.killed) == (True, True)


async def test_scorers_are_tested_by_the_first_worker_alone(
    make_engine: Any, worker_processes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []
    opened = WorkerProcess.open

    async def recorded(*arguments: Any, tested: bool) -> Any:
        told.append(tested)
        return await opened(*arguments, tested=tested)

    monkeypatch.setattr(WorkerProcess, "open", recorded)
    engine = make_engine("compute_score", workers=1)
    item = reward_pb2.ScoreItem(item_id="a", response="1", ground_truth_json="1", extra_info_json="{}")
    await engine.score([item], 240.0)
    (process,) = worker_processes()
    process.kill()
    while process in worker_processes():
        await asyncio.sleep(0.01)
    await engine.score([item], 240.0)
    assert len(told) > 1
    assert told == [False] + [True] * (len(told) - 1)


def test_a_worker_starts_without_the_configuration_and_all_that_is_heavy() -> None:
    program = "import sys; import rollmesh.reward_service.workers.program; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    heavy = {
        "asyncio",
        "grpc",
        "importlib.metadata",
        "numpy",
        "prometheus_client",
        "pydantic",
        "rollmesh.mesh.config",
        "torch",
    }
    assert not heavy & set(ran.stdout.split())
