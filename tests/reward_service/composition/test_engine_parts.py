"""Parts in the engine: gates before calls, errors by their policy, scales by source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollmesh.reward_service.composition.part import Part
from rollmesh.reward_service.outcomes import Outcome, RewardItem, Scored
from rollmesh.reward_service.scoring.engine import ScoringEngine


class Judge:
    """Answers 503 a number of times, then 10 for each item; keeps what it was asked."""

    __name__ = "judge"

    def __init__(self, failures: int = 0) -> None:
        self.asked: list[list[str]] = []
        self._failures = failures

    async def __call__(self, items: Sequence[RewardItem]) -> list[Outcome]:
        self.asked.append(sorted(item.response for item in items))
        if len(self.asked) <= self._failures:
            raise ConnectionError("503")
        return [Scored(10.0) for _ in items]


async def test_a_judge_behind_a_gate_is_asked_about_right_answers_alone(make_item: Any) -> None:
    judge = Judge(failures=1)
    engine = ScoringEngine(["exact_match", Part(judge, weight=0.1, gate="exact_match", on_error="skip")])
    items = [
        make_item(f"{group}{answer}", answer, group_id=group) for group in ("g", "h") for answer in ("42", "41", " 42")
    ]
    results = await engine.score(items, 60.0)
    await engine.close()
    assert [result.scored.total for result in results] == [2.0, 0.0, 2.0] * 2
    assert judge.asked[:2] == [[" 42", "42"]] * 2
    wrong = dict.fromkeys(("exact_match", "judge", "judge/gate", "judge/error"), 0.0)
    assert dict(results[1].scored.components) == wrong


async def test_an_error_that_lasts_is_left_out_after_all_tries_and_named(make_item: Any) -> None:
    judge = Judge(failures=9)
    engine = ScoringEngine(["exact_match", Part(judge, on_error="skip")], attempts=2)
    (result,) = await engine.score([make_item()], 60.0)
    await engine.close()
    assert len(judge.asked) == 2
    assert result.scored.total == 1.0
    assert result.scored.components["judge/error"] == 1.0
    assert "503" in result.scored.evidence


async def test_sources_share_a_scale(make_item: Any) -> None:
    engine = ScoringEngine(
        ["exact_match"], {"dapo": ["math_dapo"]}, normalize={"dapo": (-1.0, 1.0), "tenths": (0.0, 10.0)}
    )
    items = [
        make_item("a", "Answer: 42", data_source="dapo"),
        make_item("b", "Answer: 41", data_source="dapo"),
        make_item("c", "42", data_source="tenths"),
        make_item("d", "42", data_source="other"),
    ]
    results = await engine.score(items, 60.0)
    await engine.close()
    assert [result.scored.total for result in results] == [1.0, 0.0, 0.1, 1.0]
    assert results[1].scored.components["math_dapo"] == -1.0
