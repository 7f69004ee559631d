"""A scoring engine with the scorers of programs, as a reward service has it, shared by the tests of a module."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio

from rollmesh.mesh.config.reward import RewardSection
from rollmesh.protos import reward_pb2
from rollmesh.reward_service.configured import with_configured
from rollmesh.reward_service.sandbox.executor import Sandbox
from rollmesh.reward_service.sandbox.zygote_process import UnavailableError
from rollmesh.reward_service.scoring.engine import ScoringEngine

# Seconds that any call has, however busy the machine is.
LONG_S = 240.0
# `score(response, ground_truth, source, **extra_info)`; the scorer is that of the source.
Score = Callable[..., Awaitable[reward_pb2.ScoreResult]]


def make_engine(**code: Any) -> ScoringEngine:
    """An engine whose sources `all` and `fraction` are of the two scorers, with `reward.code` as given."""
    section = RewardSection(
        by_data_source={"all": ["code"], "fraction": ["code_fraction"]},
        scorer_timeout_s=LONG_S,
        code={"time_s": 30.0, "case_s": 30.0, **code},  # type: ignore[arg-type]  # as of a file
        isolation={"concurrency": 2},
    )
    functions, by_source = with_configured(section, section.functions, section.by_data_source)
    return ScoringEngine(functions, by_source, workers=1, call_timeout_s=section.scorer_timeout_s)


def scoring(engine: ScoringEngine) -> Score:
    """The function of an engine that scores one response."""

    async def score(
        response: str, truth: Any = None, source: str = "fraction", **extra_info: Any
    ) -> reward_pb2.ScoreResult:
        item = reward_pb2.ScoreItem(
            item_id="i",
            group_id="g",
            data_source=source,
            response=response,
            ground_truth_json=json.dumps(truth),
            extra_info_json=json.dumps(extra_info),
        )
        (result,) = await engine.score([item], 2 * LONG_S)
        return result

    return score


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def score() -> AsyncIterator[Score]:
    try:
        sandbox = await Sandbox.open(size=1)
    except UnavailableError as error:
        pytest.skip(str(error))
    await sandbox.close()
    engine = make_engine()
    yield scoring(engine)
    await engine.close()


async def reward(score: Score, response: str, truth: Any = None, **given: Any) -> float:
    """The reward of a response, which is scored."""
    result = await score(response, truth, **given)
    assert result.WhichOneof("outcome") == "scored", result
    return result.scored.total
