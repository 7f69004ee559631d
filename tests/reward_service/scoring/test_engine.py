"""Deadlines, sums and isolation of failures inside one process."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollmesh.reward_service.composition.plan import Composition
from rollmesh.reward_service.outcomes import JSON_LENGTH, Failed, Scored, Unscorable
from rollmesh.reward_service.scoring.engine import ScoringEngine


@pytest.fixture
def hang() -> Iterator[threading.Event]:
    """Set at the end, so that hanging scorers end with their test."""
    event = threading.Event()
    yield event
    event.set()


async def outcomes(engine: ScoringEngine, items: list[Any], timeout_s: float = 10.0) -> list[str]:
    try:
        return [
            result.error.code if result.HasField("error") else str(result.WhichOneof("outcome"))
            for result in await engine.score(items, timeout_s)
        ]
    finally:
        await engine.close()


async def test_a_hanging_call_fails_alone_and_the_rest_goes_on(make_item: Any, hang: threading.Event) -> None:
    def score(solution_str: str, ground_truth: str) -> float:
        if solution_str == "hang":
            hang.wait(180)
        return 1.0

    items = [make_item(str(n), "hang" if n in (1, 3) else "ok") for n in range(5)]
    async with asyncio.timeout(120):
        got = await outcomes(ScoringEngine([score], call_timeout_s=1.0), items)
    assert got == ["scored", "timeout", "scored", "timeout", "scored"]


async def test_given_up_threads_are_counted_and_come_back(make_item: Any, hang: threading.Event) -> None:
    engine = ScoringEngine([lambda solution_str, ground_truth: hang.wait(180)], call_timeout_s=1.0)
    (result,) = await engine.score([make_item()], 10.0)
    assert result.error.code == "timeout"
    assert result.error.retryable
    assert engine.hanging_threads == 1
    hang.set()
    (again,) = await engine.score([make_item()], 10.0)
    assert again.scored.total == 1.0
    await engine.close()


async def test_the_calls_deadline_wins_over_the_scorers(make_item: Any, hang: threading.Event) -> None:
    engine = ScoringEngine([lambda solution_str, ground_truth: hang.wait(180)], call_timeout_s=10.0)
    async with asyncio.timeout(8):
        assert await outcomes(engine, [make_item("a"), make_item("b")], timeout_s=0.1) == ["timeout", "timeout"]


async def test_coroutines_run_together_each_under_its_deadline(make_item: Any) -> None:
    together = asyncio.Barrier(49)

    async def score(solution_str: str, ground_truth: str) -> float:
        await (asyncio.sleep(30) if solution_str == "hang" else together.wait())
        return 1.0

    items = [make_item(str(n), "hang" if n == 7 else "ok") for n in range(50)]
    async with asyncio.timeout(120):
        got = await outcomes(ScoringEngine([score], call_timeout_s=2.0), items, 15.0)
    assert got == ["scored"] * 7 + ["timeout"] + ["scored"] * 42


async def test_a_coroutine_that_blocks_stops_neither_the_caller_nor_the_next_call(
    make_item: Any, hang: threading.Event
) -> None:
    async def score(solution_str: str, ground_truth: str) -> float:
        if solution_str == "block":
            hang.wait(180)
        return 1.0

    engine = ScoringEngine([score], call_timeout_s=1.0)
    (blocked,) = await engine.score([make_item(response="block")], 10.0)
    assert blocked.error.code == "timeout"
    (free,) = await engine.score([make_item()], 10.0)
    assert free.scored.total == 1.0
    await engine.close()


async def test_a_group_function_sees_each_group_whole_and_fails_for_its_group_alone(make_item: Any) -> None:
    seen = []

    def judge(completions: list[str], **_: Any) -> list[float]:
        seen.append(sorted(completions))
        if "bad" in completions:
            raise ValueError("no")
        return [float(len(completions))] * len(completions)

    items = [make_item(str(n), r, group_id=g) for n, (r, g) in enumerate([("1", "x"), ("bad", "y"), ("2", "x")])]
    assert await outcomes(ScoringEngine([judge]), items) == ["scored", "exception", "scored"]
    assert sorted(seen) == [["1", "2"], ["bad"]]


async def test_routes_by_source_and_names_components(make_item: Any) -> None:
    engine = ScoringEngine(["exact_match", "gsm8k"], {"words": ["strings"]})
    both, word = await engine.score(
        [make_item("a", "#### 42", data_source="x"), make_item("b", "'42'", data_source="words")], 5.0
    )
    await engine.close()
    assert both.scored.total == 1.0
    assert dict(both.scored.components) == {
        "exact_match": 0.0,
        "gsm8k": 1.0,
        "gsm8k/correct": 1.0,
        "gsm8k/format": 1.0,
    }
    assert dict(word.scored.components) == {"strings": 1.0}


async def test_a_pattern_that_backtracks_for_ever_ends_its_item_alone(make_item: Any) -> None:
    engine = ScoringEngine([r"regex:^(a+)+$"], workers=1, call_timeout_s=1.0)
    assert engine.scorers == {"regex": "2"}
    await engine.start()
    items = [make_item("fine", "aaa"), make_item("runaway", "a" * 60 + "b"), make_item("after", "b")]
    fine, runaway, after = await engine.score(items, 60.0)
    await engine.close()
    assert runaway.error.code == "timeout"
    assert (fine.scored.total, after.scored.total) == (1.0, 0.0)


async def test_malformed_json_fails_its_item_alone(make_item: Any) -> None:
    items = [
        make_item("a"),
        make_item("b", ground_truth_json="{"),
        make_item("c", extra_info_json="[]"),
    ]
    assert await outcomes(ScoringEngine(["exact_match"]), items) == ["scored", "bad_input", "bad_input"]


@pytest.mark.parametrize("place", ["here", "there"])
async def test_json_that_no_one_can_decode_fails_its_item_alone(make_item: Any, tmp_path: Path, place: str) -> None:
    (tmp_path / "mine.py").write_text("def score(solution_str, ground_truth): return 1.0\n")
    bad = [
        make_item("deep", extra_info_json="[" * 100_000),
        make_item("deep truth", ground_truth_json='{"a":' * 50_000),
        make_item("long", extra_info_json='{"a": "' + "x" * JSON_LENGTH + '"}'),
        make_item("number", ground_truth_json="9" * 100_000),
    ]
    items = [make_item("first"), *bad, make_item("last")]
    engine = ScoringEngine(["exact_match" if place == "here" else f"{tmp_path}/mine.py:score"])
    assert await outcomes(engine, items, 20.0) == ["scored"] + ["bad_input"] * 4 + ["scored"]


async def test_auto_takes_each_item_where_it_may_run(make_item: Any) -> None:
    engine = ScoringEngine(["auto"])
    await engine.start()
    near = await engine.score([make_item("a"), make_item("b", "41")], 10.0)
    assert [result.scored.total for result in near] == [1.0, 0.0]
    assert engine.workers.workers == 0
    items = [make_item("a"), make_item("b", r"\boxed{42}", data_source="MATH"), make_item("c", "41")]
    mixed = await engine.score(items, 60.0)
    assert [result.scored.total for result in mixed] == [1.0, 1.0, 0.0]
    assert engine.workers.workers == 1
    await engine.close()


async def test_workers_share_the_items(make_item: Any) -> None:
    together = threading.Barrier(2, timeout=60)

    def score(solution_str: str, ground_truth: str) -> float:
        together.wait()
        return 1.0

    got = await outcomes(ScoringEngine([score], workers=2), [make_item("a"), make_item("b")])
    assert got == ["scored", "scored"]


def test_sums() -> None:
    total = Composition(["a", "b"]).compose([Scored(1.0, {"x": 2.0}, [1.0, 2.0]), Scored(0.5, {}, [0.5, 0.5])])
    assert total == Scored(1.5, {"a": 1.0, "a/x": 2.0, "b": 0.5}, [1.5, 2.5])
    assert Composition(["a", "b"]).compose([Unscorable("?"), Scored(0.5)]) == Scored(0.5, {"b": 0.5}, [])
    assert Composition(["a", "b"]).compose([Unscorable("?"), Unscorable("!")]) == Unscorable("a: ?; b: !")
    failure = Failed("exception", "b raised")
    assert Composition(["a", "b"]).compose([Scored(1.0), failure]) == failure
    assert Composition([]).compose([]) == Failed("no_scorer", "no reward function is configured")
    assert Composition(["a", "b"]).compose([Scored(1.7e308), Scored(1.7e308)]) == Failed(
        "nan", "the sum of a, b is inf"
    )
