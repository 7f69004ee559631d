"""Hypothesis and random walks drive the policy machine and the Lua verbs with the same commands."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.buffer.both_machines import BothMachines
from tests.buffer.walks import TELLING, random_walk


def test_policy_machine_and_lua_verbs_agree_on_generated_commands(redis_url: str) -> None:
    BothMachines.url = redis_url
    run_state_machine_as_test(
        BothMachines,
        settings=settings(max_examples=10, stateful_step_count=30, suppress_health_check=list(HealthCheck)),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds", [TELLING, pytest.param(range(20, 52), marks=pytest.mark.exhaustive)], ids=["telling", "more"]
)
def test_policy_machine_and_lua_verbs_agree_on_long_walks(redis_url: str, seeds: Sequence[int]) -> None:
    BothMachines.url = redis_url
    seen = set().union(*(random_walk(seed, 140) for seed in seeds))
    assert seen >= {
        "trained/committed", "evicted_stale/over_bound", "evicted_stale/hopeless", "filtered/why", "failed/why",
        "failed/too_few_scored", "failed/attempts_exhausted", "readmissions", "superseded_writes", "duplicate_writes",
        "withdrawn", "cancelled", "redriven", "draft stored", "draft duplicate", "draft superseded", "draft rejected",
        "draft handed out", "draft dropped", "forgotten by the learner",
        "forgotten by a generator",
        "failed/withdrawn", "failed/payload_lost",
    }  # fmt: skip
