"""Columns of records, their reduction, and what follows from them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.dashboard.curves.columns import RecordColumns
from rollmesh.dashboard.curves.derived import (
    AGE,
    GATE_SHARE,
    GENERATED_PER_S,
    LEARNER_SHARE,
    token_ages,
    with_rates,
)
from rollmesh.dashboard.curves.lineage import Lineage
from rollmesh.dashboard.curves.memory import turn_spans
from rollmesh.dashboard.curves.reduction import Buckets, rounded
from rollmesh.dashboard.run_reader import RunReader
from rollmesh.report.metrics import is_evaluation, is_training, surviving_records
from rollmesh.report.turns import PhaseChange
from tests.rollmesh.dashboard.runs import START, evaluation, training, write_run


def columns_of(*records: dict[str, object]) -> RecordColumns:
    columns = RecordColumns()
    for record in records:
        columns.append(record)
    return columns


def test_columns_have_a_value_for_each_record() -> None:
    columns = columns_of({"a": 1, "text": "x"}, {"b": 2.5, "h": {"0": 3}}, {"a": None, "b": [1], "text": "y"}, {"a": 4})
    assert len(columns) == 4
    assert columns.names() == ["a", "b", "h/0"]
    assert np.array_equal(columns.column("a"), [1.0, math.nan, math.nan, 4.0], equal_nan=True)
    assert np.isnan(columns.column("nothing")).all()
    assert (columns.last("b"), columns.last("nothing"), columns.total("a")) == (2.5, None, 5.0)
    assert (columns.text("text"), columns.text("nothing")) == ("y", "")
    assert columns.has("h/0")
    assert not columns.has("nothing")


def test_records_that_are_undone_leave_all_columns() -> None:
    columns = columns_of({"a": 1, "text": "x"}, {"a": 2, "text": "y"}, {"a": 3})
    columns.keep(np.array([True, False, True]))
    assert columns.column("a").tolist() == [1.0, 3.0]
    assert columns.text("text") == "", "it was that of a record that is undone"
    columns.append({"a": 4, "b": 5})
    assert columns.column("a").tolist() == [1.0, 3.0, 4.0]
    assert columns.last("b") == 5.0


@given(st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(math.nan)), max_size=300), st.integers(1, 40))
def test_a_reduced_curve_hides_no_value(values: list[float], most: int) -> None:
    column = np.array(values, dtype=np.float64)
    buckets = Buckets.of(len(column), most)
    mean, (low, high) = buckets.mean_of(column), buckets.range_of(column)
    assert len(mean) == len(low) == len(high) == len(buckets.last_of(column)) <= most
    known = column[~np.isnan(column)]
    assert np.isnan(mean).all() == (len(known) == 0)
    if len(known):
        assert np.nanmin(low) == known.min()
        assert np.nanmax(high) == known.max()
        inside = ~np.isnan(mean)
        assert (mean[inside] >= low[inside] - 1e-6).all()
        assert (mean[inside] <= high[inside] + 1e-6).all()


def test_numbers_are_short() -> None:
    assert rounded([1.0, 0.123456789, math.nan, math.inf, 1e-9, 123456.7]) == [1, 0.12346, None, None, 1e-9, 123460]
    assert rounded([1234567.0], 12) == [1234567]


# Restarts: each begins again at some step.
_LAUNCHES = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 8)), min_size=1, max_size=5)


@given(_LAUNCHES)
def test_a_lineage_keeps_what_survives_restarts(launches: list[tuple[int, int]]) -> None:
    records = [
        record
        for first, count in launches
        for step in range(first, first + count)
        for record in ([training(step), evaluation(step)] if step % 3 == 0 else [training(step)])
    ]
    expected = surviving_records(records)
    lineage = Lineage(of_training=False)
    for record in records:
        lineage.add(record)
    assert lineage.steps.column("step").tolist() == [r["step"] for r in expected if is_training(r)]
    assert lineage.evaluations.column("step").tolist() == [r["step"] for r in expected if is_evaluation(r)]


def test_a_reader_follows_a_run_and_begins_again_with_a_new_folder(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 4, ended="")
    reader = RunReader(folder)
    assert reader.view.steps.column("step").tolist() == [1, 2, 3, 4]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(training(5)) + "\n" + json.dumps(training(3)) + '\n{"step": 4')
    reader.refresh()
    assert reader.view.steps.column("step").tolist() == [1, 2, 3], "4 is still being written"
    folder.rename(tmp_path / "run.before")
    write_run(folder, 1, ended="")
    reader.refresh()
    assert reader.view.steps.column("step").tolist() == [1]


def test_rates_are_those_of_the_last_seconds_and_no_launch_is_bridged() -> None:
    def look(second: float, tokens: float, gate: float, learner: float) -> dict[str, object]:
        return {
            "time": START + second,
            "generators": 2,
            "generated_tokens": tokens,
            "gate_wait_s": gate,
            "learner_wait_s": learner,
        }

    looks = [look(second, 100 * second, second, 0.25 * second) for second in range(10)]
    looks += [look(60 + second, 5000 + 10 * second, 20, 5) for second in range(3)]
    rates = with_rates(columns_of(*looks))
    assert rates.column(GENERATED_PER_S)[1:10].tolist() == [100.0] * 9
    assert rates.column(GATE_SHARE)[9] == 0.5
    assert rates.column(LEARNER_SHARE)[9] == 0.25
    assert np.isnan(rates.column(GENERATED_PER_S)[[0, 10]]).all(), "between launches nothing is known"
    assert rates.column(GENERATED_PER_S)[12] == 10.0


def test_ages_of_tokens_are_shares_that_add_up() -> None:
    steps = columns_of(
        {"staleness/histogram": {"0": 10, "2": 30}}, {"staleness/histogram": {"10": 5}}, {"critic/score/mean": 1.0}
    )
    ages = token_ages(steps)
    assert list(ages) == [f"{AGE}0", f"{AGE}2", f"{AGE}10"], "by number, not by letters"
    assert [values[0] for values in ages.values()] == [0.25, 0.75, 0.0]
    assert all(math.isnan(values[2]) for values in ages.values())


def test_turns_behind_curves_are_those_of_the_learner_and_of_swaps() -> None:
    log = [(1, "generating"), (2, "freezing"), (3, "training"), (4, "offloading"), (5, "generating")]
    phases = [PhaseChange(START + second, 1, phase, "") for second, phase in log]
    assert turn_spans(phases, START, START + 9) == [
        {"from": 2.0, "to": 3.0, "side": "swap"},
        {"from": 3.0, "to": 4.0, "side": "training"},
        {"from": 4.0, "to": 5.0, "side": "swap"},
    ]
    many = [PhaseChange(START + k, k, "training" if k % 2 else "generating", "") for k in range(1000)]
    assert turn_spans(many, START, START + 1000) == []
