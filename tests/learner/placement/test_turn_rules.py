"""Turns: when one may begin, and whether it continues."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.learner.placement.turn_requests import HOLD_S, TurnRequests
from rollmesh.learner.placement.turn_rules import TableView, TurnRules
from rollmesh.mesh.config import load_config
from rollmesh.mesh.errors import ConfigError

RULES = TurnRules(batches=2, groups=4, last_version=10)


@pytest.mark.parametrize(
    ("staleness", "setting", "batches"), [(0, None, 1), (1, None, 1), (4, None, 4), (4, 5, 5), (4, 1, 1)]
)
def test_a_turn_has_as_many_batches_as_the_bound_lets_wait(staleness: int, setting: int | None, batches: int) -> None:
    config = load_config(
        {"model": {"path": "m"}, "data": {"train": "t.jsonl"}, "placement": "colocate"},
        [f"buffer.max_staleness={staleness}", f"placement.batches_per_turn={setting or 'null'}"],
    )
    assert config.placement.mode == "collocated"
    assert TurnRules.of(config).batches == batches


def test_a_turn_of_more_batches_than_can_wait_is_refused_with_both_ways_out() -> None:
    keys = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}, "buffer": {"max_staleness": 2}}
    hint = r"at most 3 batches wait: set placement\.batches_per_turn=3 or buffer\.max_staleness=8"
    with pytest.raises(ConfigError, match=hint):
        load_config(keys | {"placement": {"mode": "collocated", "batches_per_turn": 9}})
    load_config(keys | {"placement": {"mode": "collocated", "batches_per_turn": 3}})


@pytest.mark.parametrize(
    ("table", "version", "reason"),
    [
        (TableView(generating=4, ready=0, leased=4), 0, "4 more groups are awaited for a turn of 2 batches"),
        (TableView(generating=1, ready=4, leased=4), 0, ""),
        # Nothing more comes: the gate is closed, or the data has ended.
        (TableView(generating=0, ready=1, leased=4), 0, ""),
        # The run ends with the next version.
        (TableView(generating=4, ready=0, leased=4), 9, ""),
    ],
)
def test_a_turn_begins_when_its_batches_are_there_or_no_more_come(table: TableView, version: int, reason: str) -> None:
    assert RULES.reason_to_wait(version, table) == reason
    assert "evaluation" in RULES.reason_to_wait(version, replace(table, evaluating=True))


def test_a_turn_continues_while_a_batch_is_there() -> None:
    full = TableView(generating=3, ready=3, leased=1)
    assert RULES.continues(1, 1, full)
    assert not RULES.continues(1, 2, full)
    assert not RULES.continues(1, 1, replace(full, evaluating=True))
    assert not RULES.continues(10, 1, full)
    assert not RULES.continues(1, 1, TableView(generating=8, ready=3, leased=0))


@given(st.integers(0, 9), st.integers(0, 40), st.integers(0, 40), st.integers(1, 5))
def test_no_turn_waits_for_groups_that_do_not_come(version: int, ready: int, leased: int, batches: int) -> None:
    rules = TurnRules(batches, 4, 10)
    assert rules.reason_to_wait(version, TableView(0, ready, leased)) == ""


def test_a_learner_that_was_asked_to_yield_takes_no_turn_until_it_may_or_the_time_is_over() -> None:
    now = [0.0]
    woken: list[None] = []
    requests = TurnRequests(lambda: now[0])
    requests.wake = lambda: woken.append(None)
    done = requests.hold(5.0)
    assert requests.held_s == 5.0
    assert not done.done()
    requests.answer()
    assert done.done()
    now[0] = 5.0
    assert requests.held_s == 0.0
    requests.hold(0.0)
    assert requests.held_s == HOLD_S
    requests.hold(1.0)
    assert requests.held_s == HOLD_S
    requests.resume()
    assert requests.held_s == 0.0
    assert len(woken) == 4
    assert requests.begin_turn()
    requests.hold(1.0)
    assert not requests.begin_turn()
    assert requests.begin_turn(despite_hold=True)
    cancelled = requests.hold(1.0)
    cancelled.cancel()
    requests.answer()
