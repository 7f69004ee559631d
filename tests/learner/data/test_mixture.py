"""The order of several sources: a pure function of the ordinal, with every row once per epoch and the weights met."""

from __future__ import annotations

import asyncio
import math
import signal
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.learner.data.curriculum import SEGMENT, CurriculumTurns, Progress
from rollmesh.learner.data.interleaving import Interleaving
from rollmesh.learner.data.mixture import order_of
from rollmesh.learner.data.order import DataOrder, Order
from rollmesh.learner.data.records import Blocks, RowSource
from rollmesh.learner.data.rows import Row
from rollmesh.mesh.errors import DataError
from tests.signals import handled

sizes = st.lists(st.integers(1, 30), min_size=1, max_size=4)
shares = st.lists(st.integers(0, 200), min_size=1, max_size=5).filter(any)


class Sized:
    """A source of which only the size matters."""

    def __init__(self, rows: int, blocks: Blocks | None = None) -> None:
        self._rows = rows
        self.blocks = blocks

    def __len__(self) -> int:
        return self._rows

    def rows(self, indices: Any) -> list[Row]:
        raise NotImplementedError


def mixture(rows: list[int], **settings: Any) -> Order:
    sources: list[RowSource[Row]] = [Sized(count) for count in rows]
    return order_of(sources, **{"seed": 3, "shuffle": True, "epochs": None, **settings})


@given(shares=shares, seed=st.integers(0, 50), places=st.integers(0, 3000))
def test_shares_are_met_everywhere_and_exactly_after_each_round(shares: list[int], seed: int, places: int) -> None:
    turns = Interleaving(shares, seed=seed)
    total = sum(shares)
    for source, share in enumerate(shares):
        assert abs(turns.count(source, places) - places * share / total) < 5
        assert turns.count(source, places + total) - turns.count(source, places) == share


@given(shares=shares, seed=st.integers(0, 50), first=st.integers(0, 10**12))
def test_a_place_needs_no_place_before_it(shares: list[int], seed: int, first: int) -> None:
    turns = Interleaving(shares, seed=seed)
    counts = [turns.count(source, first) for source in range(len(shares))]
    assert sum(counts) == first
    for place in range(first, first + 50):
        counts[turns.source(place)] += 1
        assert counts == [turns.count(source, place + 1) for source in range(len(shares))]


@given(
    weights=st.lists(st.floats(1e-4, 1e4), min_size=1, max_size=4).filter(lambda w: max(w) / min(w) < 1e5),
    places=st.integers(10**4, 10**7),
)
def test_weights_are_met(weights: list[float], places: int) -> None:
    turns = Interleaving.weighted(weights, seed=1)
    for source, weight in enumerate(weights):
        assert math.isclose(turns.count(source, places), places * weight / sum(weights), rel_tol=1e-4, abs_tol=30)


@pytest.mark.parametrize("weights", [[1.0, 1e-9], [1e-9, 1.0, 1.0]])
def test_the_least_weight_is_not_none(weights: list[float]) -> None:
    order = mixture([2] * len(weights), weights=weights, epochs=1)
    assert order.last_ordinal is not None
    assert order.last_ordinal < 3_000_000


@given(rows=sizes, epochs=st.integers(1, 3))
def test_without_weights_an_epoch_has_every_row_once(rows: list[int], epochs: int) -> None:
    order, total = mixture(rows, epochs=epochs), sum(rows)
    assert order.last_ordinal == epochs * total
    for epoch in range(epochs):
        places = [order.locate(epoch * total + position) for position in range(1, total + 1)]
        assert sorted(places) == [(epoch, row) for row in range(total)]
    with pytest.raises(IndexError):
        order.locate(epochs * total + 1)


@given(rows=sizes.filter(lambda rows: len(rows) > 1), ordinals=st.lists(st.integers(1, 500), min_size=1))
def test_the_place_of_an_ordinal_depends_on_nothing_but_the_ordinal(rows: list[int], ordinals: list[int]) -> None:
    weights = [float(number + 1) for number in range(len(rows))]
    asked = mixture(rows, weights=weights)
    for ordinal in ordinals:
        assert asked.locate(ordinal) == mixture(rows, weights=weights).locate(ordinal)


@given(rows=sizes.filter(lambda rows: len(rows) > 1))
def test_each_source_has_epochs_of_its_own(rows: list[int]) -> None:
    order = mixture(rows, weights=[float(number + 1) for number in range(len(rows))])
    places = [order.locate(ordinal) for ordinal in range(1, 401)]
    assert len(set(places)) == 400, "names of tasks are made of them"
    start = 0
    for count in rows:
        own = [place for place in places if start <= place[1] < start + count]
        for epoch in range(len(own) // count):
            chunk = own[epoch * count : (epoch + 1) * count]
            assert sorted(chunk) == [(epoch, row) for row in range(start, start + count)]
        start += count


def test_with_weights_the_data_end_once_every_source_had_its_epochs() -> None:
    order = mixture([10, 40], weights=[3.0, 1.0], epochs=2)
    assert order.last_ordinal is not None
    rows = Counter(order.locate(ordinal)[1] for ordinal in range(1, order.last_ordinal + 1))
    assert all(rows[row] >= 2 for row in range(50))
    last = order.locate(order.last_ordinal)
    assert last[0] == 1, "the last one is what was missing"
    assert rows[last[1]] == 2
    assert last[1] >= 10


def test_sources_of_one_size_are_shuffled_independently() -> None:
    order = mixture([50, 50])
    rows = [order.locate(ordinal)[1] for ordinal in range(1, 101)]
    assert [row for row in rows if row < 50] != [row - 50 for row in rows if row >= 50]


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any),
    window=st.integers(1, 5),
    epoch=st.integers(0, 2),
)
def test_blocks_are_used_window_by_window(sizes: list[int], window: int, epoch: int) -> None:
    total = sum(sizes)
    made = [DataOrder(total, seed=7, shuffle=True, epochs=None, blocks=Blocks(tuple(sizes), window)) for _ in range(2)]
    rows = [made[0].locate(epoch * total + position)[1] for position in range(1, total + 1)]
    assert sorted(rows) == list(range(total))
    assert rows[::-1] == [made[1].locate(epoch * total + position)[1] for position in range(total, 0, -1)]
    block_of = [block for block, size in enumerate(sizes) for _ in range(size)]
    left = Counter(block_of)
    begun = set[int]()
    for row in rows:
        begun.add(block_of[row])
        left[block_of[row]] -= 1
        assert sum(left[block] > 0 for block in begun) <= window


# ------------------------------------------------------------------------------------------ curricula


def taught(function: Any, rows: Mapping[str, int]) -> Order:
    return mixture(list(rows.values()), turns=CurriculumTurns(function, rows, seed=3))


def test_a_curriculum_moves_from_one_source_to_the_next_and_each_keeps_its_place() -> None:
    asked: list[Progress] = []

    def curriculum(progress: Progress) -> dict[str, float]:
        asked.append(progress)
        share = min(1.0, progress.prompts / (8 * SEGMENT))
        return {"easy": 1 - share, "hard": share}

    rows = {"easy": 40, "hard": 200}
    order = taught(curriculum, rows)
    places = [order.locate(ordinal) for ordinal in range(1, 10 * SEGMENT + 1)]
    assert [progress.prompts for progress in asked] == [SEGMENT * segment for segment in range(10)]
    assert all(row < 40 for _, row in places[:SEGMENT])
    assert all(row >= 40 for _, row in places[-SEGMENT:])
    assert len(set(places)) == len(places)
    easy = sum(row < 40 for _, row in places)
    assert abs(easy - 4.5 * SEGMENT) < 10
    assert asked[9].taken == {"easy": easy, "hard": 9 * SEGMENT - easy}
    for ordinal in (1, 65, 333, 640):
        assert taught(curriculum, rows).locate(ordinal) == places[ordinal - 1], "after a restart too"


@given(weights=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)).filter(any), min_size=4, max_size=4))
def test_under_a_curriculum_every_row_comes_once_per_epoch(weights: list[tuple[int, int]]) -> None:
    order = taught(lambda p: dict(zip(("a", "b"), weights[p.prompts // SEGMENT], strict=True)), {"a": 7, "b": 13})
    places = [order.locate(ordinal) for ordinal in range(1, 4 * SEGMENT + 1)]
    assert len(set(places)) == len(places)
    for start, count in ((0, 7), (7, 13)):
        own = [place for place in places if start <= place[1] < start + count]
        assert own == sorted(own, key=lambda place: place[0])
        assert all(len({row for epoch, row in own if epoch == one}) == count for one in range(len(own) // count))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"c": 1.0}, "no source is called 'c'"),
        ({"a": 0.0}, "it returned the weights"),
        ({"a": -1.0, "b": 2.0}, "it returned the weights"),
        ({"a": math.nan}, "it returned the weights"),
        ({"a": "much"}, "a weight is no number"),
        ({"a": 1e308, "b": 1e308}, "its weights are too large"),
        ({"a": 10**400}, "its weights are too large"),
        ({"a": 1e305}, "it returned the weights"),
        (0.5, "it returned float"),
        (None, "it raised ValueError: no"),
    ],
)
def test_a_curriculum_that_gives_no_weights_is_named(answer: Any, words: str) -> None:
    def curriculum(_progress: Progress) -> Any:
        if answer is None:
            raise ValueError("no")
        return answer

    with pytest.raises(DataError, match=f"data.curriculum, after 0 prompts: {words}"):
        taught(curriculum, {"a": 3, "b": 3}).locate(1)


@pytest.mark.parametrize("raised", [SystemExit(0), KeyboardInterrupt("own"), asyncio.CancelledError()])
def test_a_curriculum_ends_no_process(raised: BaseException) -> None:
    def curriculum(_progress: Progress) -> Any:
        raise raised

    # As in trainers and learners, which handle the signal themselves.
    with (
        handled(signal.SIGINT, signal.SIG_IGN),
        pytest.raises(DataError, match=f"data.curriculum, after 0 prompts: it raised {type(raised).__name__}"),
    ):
        taught(curriculum, {"a": 3, "b": 3}).locate(1)


def test_ctrl_c_in_a_curriculum_is_no_error_of_its_own() -> None:
    def curriculum(_progress: Progress) -> Any:
        raise KeyboardInterrupt

    with handled(signal.SIGINT, signal.default_int_handler), pytest.raises(KeyboardInterrupt):
        taught(curriculum, {"a": 3, "b": 3}).locate(1)
