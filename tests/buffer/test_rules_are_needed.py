"""Each rule of the contract taken away in turn: something must notice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import hiredis
import pytest
import redis.exceptions as rex

import rollmesh.buffer.redis_backend.access
from rollmesh.buffer.redis_backend.access import LoadingError, RedisAccess, store_errors
from rollmesh.buffer.redis_backend.scripts import load_scripts
from rollmesh.mesh.errors import StoreError
from tests.buffer.both_machines import CLOCK, BothMachines
from tests.buffer.rules import COMPARED, NoSuchRuleError, Rule, documented, without
from tests.buffer.walks import TELLING, random_walk
from tests.repository import REPOSITORY

pytestmark = pytest.mark.slow
# Walks after which a missing rule would have gone unnoticed.
WALKS = (*TELLING, *(seed for seed in range(40) if seed not in TELLING))


def is_evidence(error: Exception) -> bool:
    """True where a failure comes from the scripts, and not from a Redis that is slow, loading or gone."""
    return not isinstance(error, LoadingError) and not isinstance(error.__cause__, OSError | rex.RedisError)


def see_it_missed(url: str, monkeypatch: pytest.MonkeyPatch, rule: Rule, walks: Sequence[int] = WALKS) -> None:
    """Walks without the rule until something notices; fails where nothing does."""
    bare, whole = without(rule, CLOCK), load_scripts(CLOCK)

    async def compile_changed() -> None:
        access = RedisAccess(url, "rules")
        try:
            await access.batch([("SCRIPT", "LOAD", bare[name].source) for name in bare if bare[name] != whole[name]])
        finally:
            await access.close()

    # A script that Redis cannot compile would be noticed by any walk, whatever the rule.
    asyncio.run(compile_changed())
    monkeypatch.setattr(rollmesh.buffer.redis_backend.access, "load_scripts", partial(without, rule))
    BothMachines.url = url
    for seed in dict.fromkeys((rule.walk, *walks)):
        try:
            random_walk(seed, 150, compare_every=4)
        except (AssertionError, StoreError, LookupError, TypeError) as error:
            if not is_evidence(error):
                raise
            return
    pytest.fail(f"nothing noticed that this rule was missing: {rule.name}")


@pytest.mark.parametrize("rule", COMPARED, ids=lambda rule: rule.name.replace(" ", "_"))
def test_scripts_without_a_rule_differ_from_the_machine(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, rule: Rule
) -> None:
    see_it_missed(redis_url, monkeypatch, rule)


@pytest.mark.parametrize(
    "rule",
    [
        Rule("is nowhere", "claim", "no such words"),
        Rule("is there twice", "claim", "local", ""),
        Rule("takes nothing away", "claim", "free_first()", "free_first()"),
        Rule("is in a script that no verb has", "clock", "local t", "local u"),
    ],
    ids=lambda rule: rule.name.replace(" ", "_"),
)
def test_a_rule_that_takes_nothing_away_is_refused(redis_url: str, monkeypatch: pytest.MonkeyPatch, rule: Rule) -> None:
    with pytest.raises(NoSuchRuleError):
        see_it_missed(redis_url, monkeypatch, rule)


def test_a_rule_without_which_redis_cannot_read_the_script_is_refused(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoreError, match="compiling"):
        see_it_missed(
            redis_url, monkeypatch, Rule("breaks the script", "claim", "if no then return {no, snapshot()} end", "if")
        )


@pytest.mark.parametrize(
    "failure",
    [TimeoutError(), ConnectionResetError(), rex.ConnectionError(), hiredis.ReplyError("LOADING the dataset")],
    ids=repr,
)
def test_a_redis_that_fails_does_not_miss_a_rule(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    def walk(*_: object, **__: object) -> None:
        with store_errors():
            raise failure

    monkeypatch.setattr("tests.buffer.test_rules_are_needed.random_walk", walk)
    with pytest.raises(StoreError):
        see_it_missed(redis_url, monkeypatch, COMPARED[0])


def test_a_rule_that_no_one_misses_is_found_out(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unmissed = Rule(
        "hints to other fronts, of which a walk has none",
        "common",
        "if run.fronts <= 1 then return end",
        "if true then return end",
    )
    with pytest.raises(pytest.fail.Exception, match="nothing noticed"):
        see_it_missed(redis_url, monkeypatch, unmissed, walks=WALKS[:2])


def test_the_rules_are_documented() -> None:
    page = (REPOSITORY / "docs" / "buffer.md").read_text(encoding="utf-8")
    assert documented() in page, f"put this between the marks of docs/buffer.md:\n{documented()}"
