"""An item's remains in its worker, or its silent harm to it, cost no other item."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollmesh.protos import reward_pb2
from rollmesh.reward_service.scoring.engine import ScoringEngine
from tests.reward_service.workers.hostile import FORGED
from tests.reward_service.workers.test_hostile import gone, said


async def scored_among_others(
    engine: ScoringEngine, make_item: Any, act: str, *, others: int = 40
) -> reward_pb2.ScoreResult:
    """The result of an item that does `act`, in one message with good ones, all of which are scored."""
    # The worker learns that calls are quick, so that they leave together.
    await engine.score([make_item(str(n)) for n in range(64)], 240.0)
    items = [make_item(str(n), act if n == 5 else "good") for n in range(others)]
    results = await engine.score(items, 240.0)
    result = results.pop(5)
    assert [said(other) for other in results] == ["1"] * (others - 1)
    return result


async def test_what_closes_the_connection_is_found_among_those_sent_with_it(make_engine: Any, make_item: Any) -> None:
    engine = make_engine("compute_score", workers=1, call_timeout_s=240.0)
    result = await scored_among_others(engine, make_item, "close-and-return")
    assert said(result) == "crashed"
    assert not result.error.retryable
    assert engine.workers.died <= 3, "with the others, alone, and alone in a new worker"


async def test_a_coroutine_that_closes_the_connection_is_found_as_well(make_engine: Any, make_item: Any) -> None:
    engine = make_engine("judge", call_timeout_s=240.0)
    assert said(await scored_among_others(engine, make_item, "close-and-return")) == "crashed"


@pytest.mark.parametrize(
    "form", [form if form == "number" else pytest.param(form, marks=pytest.mark.exhaustive) for form in FORGED]
)
async def test_who_forges_an_answer_ends_alone(make_engine: Any, make_item: Any, form: str) -> None:
    engine = make_engine("compute_score", workers=1, call_timeout_s=240.0)
    result = await scored_among_others(engine, make_item, f"forge {form}")
    assert said(result) == "crashed"
    assert "it wrote something that is not an answer" in result.error.message
    assert not result.error.retryable


async def test_an_innocent_item_is_not_blamed_for_what_an_earlier_one_has_left(
    make_engine: Any, make_item: Any
) -> None:
    engine = make_engine("compute_score", workers=1, call_timeout_s=240.0)
    await engine.start()
    for act in ("arm", "trip"):
        assert said((await engine.score([make_item(act, act)], 240.0))[0]) == "1"
    assert engine.workers.died == 1


async def test_a_timer_goes_off_in_the_item_that_has_set_it_or_never(make_engine: Any, make_item: Any) -> None:
    engine = make_engine("compute_score", workers=1, call_timeout_s=240.0)
    await engine.start()
    await engine.score([make_item("sets", "alarm-later")], 240.0)
    assert said((await engine.score([make_item("finds", "alarm-left")], 240.0))[0]) == "0"


async def test_the_owner_outlives_a_function_that_truncates_what_it_finds_open(
    make_engine: Any, make_item: Any
) -> None:
    engine = make_engine("compute_score", workers=1, call_timeout_s=240.0)
    assert said(await scored_among_others(engine, make_item, "truncate")) == "1"


async def test_what_hangs_is_tried_once_though_its_call_ends_before(
    make_engine: Any, make_item: Any, tmp_path: Path
) -> None:
    engine = make_engine("compute_score", workers=1, call_timeout_s=240.0)
    await engine.start()
    over = tmp_path / "over"
    os.mkfifo(over)
    hangs = make_item("a", f"hang-until-over {over}")
    (early,) = await engine.score([hangs], 0.5)
    assert early.error.retryable, early.error.message
    again = asyncio.create_task(engine.score([hangs, make_item("b")], 240.0))
    await asyncio.sleep(0)
    await asyncio.to_thread(over.write_text, "!")
    hanging, good = await again
    assert said(good) == "1"
    assert "no answer within 240 s" in hanging.error.message
    assert not hanging.error.retryable
    assert engine.workers.overdue == 1


async def test_a_child_that_leaves_its_session_ends_with_its_worker(
    make_engine: Any, make_item: Any, tmp_path: Path
) -> None:
    engine = make_engine("compute_score", workers=1, call_timeout_s=240.0)
    (result,) = await engine.score([make_item("a", f"escape {tmp_path / 'pid'}")], 240.0)
    assert said(result) == "timeout"
    await gone(int((tmp_path / "pid").read_text()))


async def test_what_a_function_leaves_behind_is_buried(make_engine: Any, make_item: Any, tmp_path: Path) -> None:
    """It becomes the worker's own, and would stay a zombie for as long as that lives."""
    engine = make_engine("compute_score", workers=1)
    await engine.start()
    orphan = tmp_path / "pid"
    (result,) = await engine.score([make_item("0", f"orphan {orphan}")], 240.0)
    assert said(result) == "1"
    async with asyncio.timeout(180):
        while psutil.pid_exists(int(orphan.read_text())):
            (result,) = await engine.score([make_item("1", "good")], 240.0)
            assert said(result) == "1"
            await asyncio.sleep(0.05)
