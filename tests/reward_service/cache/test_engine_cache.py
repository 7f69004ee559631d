"""The cache in the engine: which scores are kept, under which keys, and who gets them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollmesh.mesh.config.reward import RewardSection
from rollmesh.mesh.config.scorers.cache import CacheSection
from rollmesh.mesh.trajectory.content_key import content_key
from rollmesh.reward_service.cache.cache import CacheStats, ScoreCache
from rollmesh.reward_service.cache.identity import Identity, identity_of
from rollmesh.reward_service.client.client import LocalScorer
from rollmesh.reward_service.outcomes import Outcome, RewardItem, Scored
from rollmesh.reward_service.scoring.configured import configured_engine
from rollmesh.reward_service.scoring.engine import ScoringEngine

# Counts its calls in a file, as it runs in worker processes. Without a ground truth it has no opinion.
COUNTING = """
import pathlib
FILE = pathlib.Path(__file__).with_suffix(".calls")

def score(solution_str, ground_truth):
    with FILE.open("a") as calls:
        calls.write(solution_str + "\\n")
    if solution_str == "bug":
        raise ValueError("a bug")
    return None if ground_truth is None else {"score": float(len(solution_str)), "length": len(solution_str)}

def group(completions, **columns):
    return [score(text, "") for text in completions]
"""


class Judge:
    """Scores each item of a group by itself; counts what it is asked."""

    __name__ = "judge"
    cache_version = "1"
    needs_group = False

    def __init__(self) -> None:
        self.deterministic = False
        self.asked: list[str] = []

    async def __call__(self, items: Sequence[RewardItem]) -> list[Outcome]:
        self.asked += [item.response for item in items]
        return [Scored(1.0, cost=0.5, evidence="so") for _ in items]


@pytest.fixture
def counting(tmp_path: Path) -> Path:
    path = tmp_path / "counting.py"
    path.write_text(COUNTING)
    return path


def calls(counting: Path) -> list[str]:
    path = counting.with_suffix(".calls")
    return sorted(path.read_text().split()) if path.exists() else []


async def test_a_function_that_its_user_names_is_called_once_for_equal_items(counting: Path, make_item: Any) -> None:
    spec = f"{counting}:score"
    engine = ScoringEngine([spec], cache=ScoreCache(CacheSection(functions=[spec])), workers=1)
    await engine.start()
    texts = ["a", "a", "bb", "bug", "bug"]
    first = await engine.score([make_item(str(n), text) for n, text in enumerate(texts)], 60.0)
    again = await engine.score(
        [make_item(f"again {n}", text, group_id="other", run="other") for n, text in enumerate(texts)], 60.0
    )
    other = await engine.score([make_item("x", "a", truth=None), make_item("y", "a", prompt="?")], 60.0)
    await engine.close()
    assert [result.scored.total for result in first[:3]] == [1.0, 1.0, 2.0]
    assert [result.scored.cached for result in (*first[:3], *again[:3])] == [False, True, False, True, True, True]
    assert [dict(result.scored.components) for result in again[:3]] == [dict(r.scored.components) for r in first[:3]]
    assert [result.error.code for result in (*first[3:], *again[3:])] == ["exception"] * 4
    assert other[0].HasField("unscorable")
    assert not other[1].scored.cached
    assert calls(counting) == ["a", "a", "a", "bb", "bug", "bug", "bug", "bug"]


async def test_a_callers_own_key_leads_to_no_one_elses_score(counting: Path, make_item: Any) -> None:
    spec = f"{counting}:score"
    engine = ScoringEngine([spec], cache=ScoreCache(CacheSection(functions=[spec])), workers=1)
    await engine.start()
    victim = make_item("victim", "12345")
    await engine.score([make_item("poison", "1", content_key=content_key(victim))], 60.0)
    victim.content_key = content_key(victim)
    (result,) = await engine.score([victim], 60.0)
    (cut,) = await engine.score([make_item("t", "12345", finish_reason="length")], 60.0)
    await engine.close()
    assert (result.scored.total, result.scored.cached, cut.scored.cached) == (5.0, False, False)


async def test_functions_of_groups_and_functions_without_a_name_in_the_list_are_always_called(
    counting: Path, make_item: Any, caplog: pytest.LogCaptureFixture
) -> None:
    named = [f"{counting}:group", "json:loads", "judge"]
    cache = ScoreCache(CacheSection(functions=named))
    with caplog.at_level(logging.WARNING):
        engine = ScoringEngine([f"{counting}:group", f"{counting}:score", "qa"], cache=cache, workers=1)
        ScoringEngine([lambda solution_str, ground_truth: 1.0, "json:loads"], cache=cache)
    await engine.start()
    for _ in range(2):
        await engine.score([make_item("a", "x")], 60.0)
    await engine.close()
    assert calls(counting) == ["x"] * 4
    assert cache.stats == CacheStats()
    assert "scores of loads are not kept (reward.cache.functions): only functions in a file" in caplog.text
    assert caplog.text.count("are not kept") == 1


async def test_scorers_of_the_package_are_kept_where_they_are_not_linear(make_item: Any) -> None:
    scorer = LocalScorer(configured_engine(RewardSection(functions=["auto", r"regex:^\d+$"], workers=1)))
    await scorer.start()
    items = [make_item("n", "42"), make_item("m", r"\boxed{42}", data_source="math")]
    first = await scorer.score(items)
    engine = scorer._engine
    assert engine.cache is not None
    assert engine.cache.stats == CacheStats(missed=3)
    again = await scorer.score(items)
    await scorer.close()
    assert engine.cache.stats == CacheStats(memory=3, missed=3)
    assert [result.scored.total for result in again] == [result.scored.total for result in first] == [2.0, 1.0]
    # A sum is one that was found earlier if all its parts were.
    assert [result.scored.cached for result in again] == [False, True]


@pytest.mark.parametrize("declared", [True, False])
async def test_an_object_is_kept_under_its_version_and_costs_nothing_then(make_item: Any, declared: bool) -> None:
    judge = Judge()
    judge.deterministic = declared
    engine = ScoringEngine([judge], cache=ScoreCache(CacheSection(functions=[] if declared else ["judge"])))
    first = await engine.score([make_item("a", "x"), make_item("b", "y")], 60.0)
    again = await engine.score([make_item("c", "y"), make_item("d", "z")], 60.0)
    await engine.close()
    assert judge.asked == ["x", "y", "z"]
    assert [result.scored.cost for result in (*first, *again)] == [0.5, 0.5, 0.0, 0.5]
    assert again[0].scored.evidence == "so"


def test_all_on_which_scores_depend_is_in_the_key(tmp_path: Path, make_item: Any) -> None:
    schema = tmp_path / "schema.json"

    def key(spec: Any, text: str = "1") -> bytes:
        schema.write_text(text)
        identity = identity_of(spec)
        assert isinstance(identity, Identity)
        return identity.key(make_item(), b"content", ())

    specs = ["math", "auto", "regex:a", "regex:b", f"json_schema:{schema}", f"json_schema_fraction:{schema}"]
    keys = [key(spec) for spec in specs]
    assert len(set(keys)) == len(specs)
    assert key(specs[4], "2") != keys[4]
    assert key(specs[4]) == keys[4]


async def test_a_file_that_changes_is_cached_no_more(counting: Path, make_item: Any) -> None:
    spec = f"{counting}:score"
    engine = ScoringEngine([spec], cache=ScoreCache(CacheSection(functions=[spec])), workers=1)
    await engine.start()
    await engine.score([make_item("a", "x")], 60.0)
    counting.write_text(COUNTING + "# another\n")
    (result,) = await engine.score([make_item("b", "x")], 60.0)
    await engine.close()
    assert not result.scored.cached
    assert calls(counting) == ["x", "x"]


def test_without_memory_there_is_no_cache() -> None:
    engine = configured_engine(RewardSection(cache=CacheSection(max_bytes=0)))
    assert engine.cache is None
