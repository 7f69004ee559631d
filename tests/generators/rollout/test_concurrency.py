"""The limit of sequences in hand: bounded, steady, recovering, and near the best fixed one on a simulated engine."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollmesh.generators.rollout.concurrency import (
    CUT_FACTOR,
    KV_USAGE_FULL,
    MAX_PROBE_S,
    MEMORY_S,
    PREEMPTED_SHARE,
    PROBE_S,
    RISE_S,
    STEPS,
    WAIT_S,
    ConcurrencyController,
    LoadSample,
)

_looks = st.lists(
    st.tuples(
        st.floats(0.1, 30.0),
        st.integers(0, 400),
        st.integers(0, 400),
        st.integers(0, 100),
        st.none() | st.floats(0, 1),
        st.integers(0, 50),
    ),
    max_size=80,
)


@given(st.integers(1, 256), st.integers(1, 64), _looks)
def test_the_limit_stays_between_floor_and_slots(slots: int, least: int, looks: list[tuple[float, ...]]) -> None:
    machine, at = ConcurrencyController(slots, least), 0.0
    for pause, in_flight, active, waiting, usage, preemptions in looks:
        at += pause
        before = machine.limit
        limit = machine.observe(LoadSample(at, int(in_flight), int(active), int(waiting), usage, int(preemptions)))
        assert min(slots, least) <= limit <= slots
        assert limit - before <= max(1, slots // STEPS), "up by single steps only"


@given(st.integers(1, 256), st.integers(1, 64), st.lists(st.integers(0, 600), max_size=60))
def test_an_engine_that_never_complains_stays_at_the_ceiling(slots: int, least: int, hands: list[int]) -> None:
    """Such as one without a bound of its KV cache; requests after full slots are a queue, no complaint."""
    machine = ConcurrencyController(slots, least)
    for second, in_flight in enumerate(hands):
        active = min(slots, in_flight)
        assert machine.observe(LoadSample(second, in_flight, active, in_flight - active, None, 0)) == slots
    assert not machine.reason


def obedient(
    machine: ConcurrencyController, capacity: int, at: float, preemptions: int, need: int = 10_000
) -> tuple[LoadSample, int]:
    """A plant in which everything in hand is decoded, and each second above the capacity costs preemptions."""
    in_flight = min(machine.limit, need)
    preemptions += max(0, in_flight - capacity)
    return LoadSample(at, in_flight, in_flight, 0, None, preemptions), preemptions


@given(st.integers(16, 256), st.floats(0.2, 0.95))
@example(146, 0.28125)  # one too many, which takes longer to show itself than the first probe lasts
def test_no_oscillation_beyond_the_band_and_probes_grow_rare(slots: int, share: float) -> None:
    machine, preemptions = ConcurrencyController(slots, 1), 0
    capacity = max(-(-slots // 16) + 1, int(share * slots))
    step = max(1, slots // STEPS)
    seen: list[int] = []
    for second in range(3000):
        look, preemptions = obedient(machine, capacity, float(second), preemptions)
        seen.append(machine.observe(look))
    settled = seen[300:]
    # A surplus of so many costs fewer preemptions than are taken for an overload.
    borne = capacity + 1 + int(PREEMPTED_SHARE * capacity / MEMORY_S)
    assert min(settled) >= int(CUT_FACTOR * capacity)
    assert max(settled) <= borne + step
    # Each probe that fails doubles the wait for the next.
    cuts = sum(later < earlier for earlier, later in pairwise(seen[-1501:]))
    assert cuts <= 4 + 1500 / MAX_PROBE_S
    assert np.mean(settled[-1000:]) >= 0.95 * capacity - 2 * step


@given(st.integers(16, 256), st.integers(20, 400))
def test_it_recovers_when_the_overload_has_ended(slots: int, overloaded_s: int) -> None:
    machine, preemptions = ConcurrencyController(slots, 1), 0
    for second in range(overloaded_s):
        look, preemptions = obedient(machine, slots // 3, float(second), preemptions)
        machine.observe(look)
    assert machine.limit < slots
    # Twice: the wait that has grown, and as long at the level that was bad.
    patience = int(2 * MAX_PROBE_S + 2 * PROBE_S + RISE_S * 2 * slots)
    for second in range(overloaded_s, overloaded_s + patience):
        look, preemptions = obedient(machine, slots, float(second), preemptions)
        machine.observe(look)
    assert machine.limit == slots


def test_an_overload_that_is_long_over_is_forgotten() -> None:
    machine, at, preemptions = ConcurrencyController(64, 1), 0, 0
    limits: list[list[int]] = []
    for _ in range(2):
        limits.append([])
        for capacity, seconds in ((62, 300), (64, 1000)):
            for _ in range(seconds):
                at += 1
                look, preemptions = obedient(machine, capacity, float(at), preemptions)
                limits[-1].append(machine.observe(look))
    assert limits[0] == limits[1]


def test_what_is_taken_for_an_overload() -> None:
    def seen(*looks: LoadSample) -> tuple[int, str]:
        machine = ConcurrencyController(64, 4)
        for look in looks:
            machine.observe(look)
        return machine.limit, machine.reason

    assert seen(LoadSample(0, 64, 60, 4, 0.5, 20)) == (int(CUT_FACTOR * 64), "20 preemptions in 10 s")
    assert seen(LoadSample(0, 64, 60, 4, 0.5, 3)) == (64, ""), "a few cost less than idle slots"
    assert seen(LoadSample(0, 64, 60, 4, 0.5, 8), LoadSample(2, 64, 60, 4, 0.5, 16))[0] == int(CUT_FACTOR * 64), (
        "they add up"
    )
    assert seen(LoadSample(0, 64, 60, 4, 0.5, 8), LoadSample(100, 64, 64, 0, 0.5, 16))[0] == 64, "and are forgotten"
    assert seen(LoadSample(0, 40, 40, 0, KV_USAGE_FULL, 0))[0] == int(CUT_FACTOR * 40)
    assert seen(LoadSample(0, 40, 40, 0, 0.5, 0), LoadSample(1, 40, 40, 0, 1.0, 0))[0] == 64, "full for a moment"
    waiting = [LoadSample(second, 64, 50, 14, 0.5, 0) for second in range(int(WAIT_S) + 1)]
    assert seen(*waiting[:-1]) == (64, "")
    assert seen(*waiting) == (int(CUT_FACTOR * 64), "14 requests wait although slots are free")
    assert seen(*waiting[:-1], LoadSample(WAIT_S, 64, 64, 0, 0.5, 0), waiting[-1]) == (64, "")
    # The surplus is not judged again while it is being worked off; counters that begin again are no preemptions.
    falling = [LoadSample(second / 2, 64 - second // 2, 50, 0, 0.99, 50 + 50 * second) for second in range(12)]
    assert seen(*falling)[0] == int(CUT_FACTOR * 64)
    assert (
        seen(LoadSample(0, 64, 64, 0, 0.1, 12), LoadSample(1, 64, 64, 0, 0.1, 0), LoadSample(2, 64, 64, 0, 0.1, 0))[0]
        == 64
    )


class Plant:
    """Continuous batching with a KV cache of `room` tokens. A sequence that finds none left loses all it has, and is
    prefilled again, `cost` seconds per token. A step takes longer the more are decoded in it."""

    def __init__(self, room: int, slots: int, cost: float, seed: int) -> None:
        self.room, self.slots, self.cost = room, slots, cost
        self.random = np.random.default_rng(seed)
        self.length = np.zeros(0, np.int64)
        self.goal = np.zeros(0, np.int64)
        self.lost: list[tuple[int, int]] = []
        self.clock, self.done, self.preemptions = 0.0, 0, 0

    @property
    def in_flight(self) -> int:
        return len(self.length) + len(self.lost)

    def step(self, limit: int) -> None:
        fresh = max(0, limit - self.in_flight)
        line = self.lost + [(64, int(goal)) for goal in self.random.integers(100, 500, fresh)]
        started: list[tuple[int, int]] = []
        used = int(self.length.sum())
        while line and len(self.length) + len(started) < self.slots and used + line[0][0] < 0.99 * self.room:
            started.append(line.pop(0))
            used += started[-1][0]
        self.lost = line
        self.length = np.append(self.length, [length for length, _ in started]).astype(np.int64)
        self.goal = np.append(self.goal, [goal for _, goal in started]).astype(np.int64)
        prefilled = sum(length for length, _ in started)
        self.clock += 0.05 + 0.0004 * len(self.length) + self.cost * prefilled
        self.length += 1
        while self.length.sum() > self.room:
            self.preemptions += 1
            self.lost.insert(0, (int(self.length[-1]), int(self.goal[-1])))
            self.length, self.goal = self.length[:-1], self.goal[:-1]
        over = self.length >= self.goal
        self.done += int((self.goal[over] - 64).sum())
        self.length, self.goal = self.length[~over], self.goal[~over]

    def look(self) -> LoadSample:
        usage = float(self.length.sum() / self.room)
        return LoadSample(self.clock, self.in_flight, len(self.length), len(self.lost), usage, self.preemptions)


def throughput(plant: Plant, limit: int | None, seconds: float = 400.0) -> float:
    """Tokens of finished responses per second, after the settling; a fixed limit, or the machine's."""
    machine, looked, began = ConcurrencyController(plant.slots, 4), 0.0, None
    while plant.clock < seconds:
        plant.step(machine.limit if limit is None else limit)
        if plant.clock - looked >= 1.0:
            looked = plant.clock
            machine.observe(plant.look())
        if began is None and plant.clock > 0.3 * seconds:
            began = plant.clock, plant.done
    assert began is not None
    return (plant.done - began[1]) / (plant.clock - began[0])


@pytest.mark.parametrize(
    ("bears", "cost", "gain"),
    [(16, 0.0005, 0.9), pytest.param(40, 0.0001, 0.9, marks=pytest.mark.exhaustive), (40, 0.002, 1.25)],
)
def test_throughput_settles_near_that_of_the_best_fixed_limit(bears: int, cost: float, gain: float) -> None:
    room = bears * 180
    limits = (3 * bears // 4, bears, 64)
    fixed = {limit: throughput(Plant(room, 64, cost, seed=1), limit) for limit in limits}
    adaptive = throughput(Plant(room, 64, cost, seed=2), None)
    assert adaptive >= 0.88 * max(fixed.values()), fixed
    assert adaptive >= gain * fixed[64], "where prefilling anew is dear, more than the engine bears is slower"
