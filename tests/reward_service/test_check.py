"""`reward check` names in words what is wrong with a server's answers."""

import asyncio
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from rollmesh.mesh.errors import ConfigError, DataError
from rollmesh.protos import reward_pb2
from rollmesh.reward_service.check import CheckReport, Finding, check_endpoint
from rollmesh.reward_service.samples import items_from_file
from tests.command import Command

Spoil = Callable[[reward_pb2.ScoreItem, reward_pb2.ScoreResponse], None]


def spoiled(spoil: Spoil) -> Any:
    async def behave(request: reward_pb2.ScoreRequest, context: Any) -> reward_pb2.ScoreResponse:
        response = reward_pb2.ScoreResponse()
        for item in request.items:
            spoil(item, response)
        return response

    return behave


def nan(item: reward_pb2.ScoreItem, response: reward_pb2.ScoreResponse) -> None:
    response.results.add(item_id=item.item_id).scored.total = math.nan


def renamed(item: reward_pb2.ScoreItem, response: reward_pb2.ScoreResponse) -> None:
    response.results.add(item_id=item.item_id.upper() + "!").scored.total = 1.0


def short_tokens(item: reward_pb2.ScoreItem, response: reward_pb2.ScoreResponse) -> None:
    response.results.add(item_id=item.item_id).scored.per_token.extend([1.0] * (len(item.response_ids) + 1))


def always_zero(item: reward_pb2.ScoreItem, response: reward_pb2.ScoreResponse) -> None:
    response.results.add(item_id=item.item_id).scored.total = 0.0


def always_error(item: reward_pb2.ScoreItem, response: reward_pb2.ScoreResponse) -> None:
    response.results.add(item_id=item.item_id).error.message = "judge away"


def twice(item: reward_pb2.ScoreItem, response: reward_pb2.ScoreResponse) -> None:
    for total in (0.0, 1.0):
        response.results.add(item_id=item.item_id).scored.total = total


@pytest.mark.parametrize(
    ("spoil", "severity", "words"),
    [
        (nan, "error", ["nan: 8 of 8 items", "must be finite"]),
        (renamed, "error", ["8 results for unknown items", "echo item_id"]),
        (renamed, "error", ["missing_result: 8 of 8 items"]),
        (short_tokens, "error", ["per_token_length", "one value per entry of response_ids"]),
        (twice, "error", ["duplicate_result", "exactly one result"]),
        (always_zero, "warning", ["failure in disguise"]),
        (always_zero, "warning", ["all scores are 0.0"]),
        (always_error, "error", ["8 of 8 ended in error", "judge away"]),
        (always_error, "warning", ["without a code"]),
    ],
)
async def test_says_what_is_wrong(scripted: Any, spoil: Spoil, severity: str, words: list[str]) -> None:
    server = await scripted(spoiled(spoil))
    findings = (await check_endpoint(server.address, timeout_s=5)).findings
    assert any(f.severity == severity and all(word in f.message for word in words) for f in findings), findings


async def test_one_item_that_fails_the_whole_call(scripted: Any) -> None:
    async def fragile(request: reward_pb2.ScoreRequest, context: Any) -> reward_pb2.ScoreResponse:
        response = reward_pb2.ScoreResponse()
        for item in request.items:
            response.results.add(item_id=item.item_id).scored.total = len(json.loads(item.ground_truth_json))
        return response

    server = await scripted(fragile)
    findings = (await check_endpoint(server.address, timeout_s=5)).findings
    assert [f.probe for f in findings if f.severity == "error"] == ["malformed ground truth", "no ground truth"]
    assert all("one bad item must not fail the call" in f.message for f in findings if f.severity == "error")


async def test_deadlines_that_are_not_honoured(scripted: Any) -> None:
    """The second big batch outlives its deadline by as long as the first took, and what comes after it has to wait."""
    turn, passed = asyncio.Lock(), asyncio.Event()
    # When the call before the first big batch was answered: what has passed since is no less than the caller measured.
    before, big = time.monotonic(), 0

    async def work_on(longer_s: float) -> None:
        async with turn:
            await passed.wait()
            await asyncio.sleep(longer_s)

    async def stubborn(request: reward_pb2.ScoreRequest, context: Any) -> reward_pb2.ScoreResponse:
        nonlocal before, big
        big += len(request.items) > 8
        if len(request.items) <= 8:
            async with turn:
                before = time.monotonic()
        elif big == 1:
            await asyncio.sleep(0.3)
        else:
            try:
                await asyncio.shield(asyncio.create_task(work_on(time.monotonic() - before)))
            finally:
                passed.set()
        response = reward_pb2.ScoreResponse()
        for item in request.items:
            response.results.add(item_id=item.item_id).scored.total = len(item.response)
        return response

    server = await scripted(stubborn)
    messages = [
        f.message for f in (await check_endpoint(server.address, timeout_s=20)).findings if f.probe == "deadline"
    ]
    assert len(messages) == 2
    assert "was not answered by then" in messages[0]
    assert "deadline not honoured" in messages[1]


async def test_a_server_that_hangs(scripted: Any) -> None:
    async def hang(request: Any, context: Any) -> reward_pb2.ScoreResponse:
        await asyncio.sleep(60)
        return reward_pb2.ScoreResponse()

    server = await scripted(hang)
    findings = (await check_endpoint(server.address, timeout_s=0.1)).findings
    assert any("DEADLINE_EXCEEDED" in f.message and "did not answer in time" in f.message for f in findings)


async def test_something_else_at_the_address() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    findings = (await check_endpoint(f"grpc://127.0.0.1:{port}", timeout_s=5)).findings
    await server.stop(0)
    assert any("is it compiled from reward.proto?" in f.message for f in findings)


async def test_no_one_there_and_no_address() -> None:
    report = await check_endpoint("grpc://127.0.0.1:9", timeout_s=0.3)
    assert not report.ok
    assert "unreachable" in report.lines()[1]
    assert report.lines()[-1].startswith("not usable")
    for wrong in ("grpc://127.0.0.1", "grpc://:1", "grpc://host:99999", "grpc://host:1/path"):
        with pytest.raises(ConfigError, match="is not host:port"):
            await check_endpoint(wrong)


async def test_report_of_the_third_party_server(third_party_server: str) -> None:
    report = await check_endpoint(third_party_server)
    assert report.ok
    assert (report.server, report.scored, report.failed) == ("example 1", 8, 0)
    assert report.lines()[-1].startswith("usable")


def test_the_command_says_so(third_party_server: str, rollmesh: Command) -> None:
    check = rollmesh("reward", "check", third_party_server)
    assert check.returncode == 0, check.stdout + check.stderr
    assert "usable" in check.stdout


def test_only_errors_make_it_unusable() -> None:
    assert CheckReport("a", [Finding("warning", "p", "m"), Finding("note", "p", "m")]).ok
    assert not CheckReport("a", [Finding("error", "p", "m")]).ok


def test_samples_from_files(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [
        {
            "prompt": [{"role": "user", "content": "12+30="}],
            "data_source": "arithmetic",
            "reward_model": {"style": "rule", "ground_truth": "42"},
            "extra_info": {"index": n},
        }
        for n in range(3)
    ]
    parquet, jsonl = tmp_path / "rows.parquet", tmp_path / "rows.jsonl"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), parquet)
    jsonl.write_text("\n".join(map(json.dumps, rows)))
    for path in (parquet, jsonl):
        items = items_from_file(path)
        assert len(items) == 6
        assert (items[0].prompt, items[0].response, items[0].data_source) == ("12+30=", "42", "arithmetic")
        assert json.loads(items[2].extra_info_json) == {"index": 1}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no rows"),
        ("{", "sample file"),
        ('{"prompt": "x", "data_source": "y"}', "row 0: no field 'reward_model'"),
    ],
)
def test_sample_files_that_cannot_be_used(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=words):
        items_from_file(path)


def test_a_sample_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing\.jsonl"):
        items_from_file(tmp_path / "nothing.jsonl")
