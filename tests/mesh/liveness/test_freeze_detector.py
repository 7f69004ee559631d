"""When a silent process is frozen: each bound, and what must never pass for it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.mesh.liveness.freeze_detector import Bounds, FreezeDetector, FreezeKind, Frozen, ProcessState, ThreadState

BOUNDS = Bounds.of(20.0, leaving_s=30.0)
LONG = 100_000
# A second of a machine with two cores that sixteen busy loops of a higher priority share with this process.
STARVED_S = 0.03


def looks(
    judge: FreezeDetector,
    states: Sequence[ThreadState],
    *,
    cpu: float = 0.0,
    every_s: float = 1.0,
    threads: int = 1,
    port_closed: bool = False,
) -> tuple[float, Frozen] | None:
    """The time of the verdict and the verdict, of looks at a process whose threads get `cpu` seconds between two."""
    for index, state in enumerate(states):
        process = ProcessState(state, dict.fromkeys(range(threads), index * cpu))
        if verdict := judge.observe_silence(index * every_s, process, port_closed=port_closed):
            return index * every_s, verdict
    return None


def kind_of(found: tuple[float, Frozen] | None) -> tuple[float, FreezeKind] | None:
    return found and (found[0], found[1].kind)


def test_stopped_for_longer_than_the_grace() -> None:
    assert kind_of(looks(FreezeDetector(BOUNDS), [ThreadState.STOPPED] * LONG)) == (20.0, FreezeKind.STOPPED)


def test_stopped_and_continued_before_is_nothing() -> None:
    assert looks(FreezeDetector(BOUNDS), ([ThreadState.STOPPED] * 19 + [ThreadState.RUNNABLE]) * 50) is None


def test_holds_its_interpreter() -> None:
    assert kind_of(looks(FreezeDetector(BOUNDS), [ThreadState.RUNNABLE] * LONG, cpu=1.0)) == (20.0, FreezeKind.RUNNING)


def test_many_threads_do_not_add_up() -> None:
    """Sixty-four threads that compute are one second of silence a second, not a minute."""
    assert kind_of(looks(FreezeDetector(BOUNDS), [ThreadState.RUNNABLE] * LONG, cpu=1.0, threads=64)) == (
        20.0,
        FreezeKind.RUNNING,
    )


def test_half_a_processor_takes_twice_as_long() -> None:
    assert kind_of(looks(FreezeDetector(BOUNDS), [ThreadState.RUNNABLE] * LONG, cpu=0.5)) == (40.0, FreezeKind.RUNNING)


def test_deadlocked() -> None:
    assert kind_of(looks(FreezeDetector(BOUNDS), [ThreadState.ASLEEP] * LONG)) == (60.0, FreezeKind.ASLEEP)


def test_deadlocked_with_timers_that_tick() -> None:
    assert kind_of(looks(FreezeDetector(BOUNDS), [ThreadState.ASLEEP] * LONG, cpu=0.01)) == (60.0, FreezeKind.ASLEEP)


def test_starved_is_busy_for_ten_minutes() -> None:
    assert looks(FreezeDetector(BOUNDS), [ThreadState.RUNNABLE] * 600, cpu=STARVED_S) is None


def test_a_debugger_may_hold_it() -> None:
    assert looks(FreezeDetector(BOUNDS), [ThreadState.TRACED] * LONG) is None


def test_closed_its_port_and_does_not_end() -> None:
    found = looks(FreezeDetector(BOUNDS), [ThreadState.ASLEEP] * LONG, port_closed=True)
    assert kind_of(found) == (30.0, FreezeKind.LEAVING)


def test_may_work_hard_after_it_has_closed_its_port() -> None:
    bounds = Bounds.of(20.0, leaving_s=120.0)
    assert looks(FreezeDetector(bounds), [ThreadState.RUNNABLE] * 120, cpu=1.0, port_closed=True) is None


@pytest.mark.parametrize("state", [ThreadState.STOPPED, ThreadState.ASLEEP, ThreadState.RUNNABLE])
def test_nothing_is_frozen_where_it_is_said_so(state: ThreadState) -> None:
    for port_closed in (False, True):
        assert (
            looks(FreezeDetector(Bounds.of(0.0, leaving_s=1.0)), [state] * 10_000, cpu=1.0, port_closed=port_closed)
            is None
        )


@pytest.mark.parametrize("state", [ThreadState.STOPPED, ThreadState.ASLEEP, ThreadState.RUNNABLE])
def test_the_watchers_own_absence_does_not_count(state: ThreadState) -> None:
    """A watcher that was stopped for an hour has seen one second of silence."""
    judge = FreezeDetector(BOUNDS)
    assert judge.observe_silence(0.0, ProcessState(state, {1: 0.0})) is None
    assert judge.observe_silence(3600.0, ProcessState(state, {1: 3000.0})) is None
    assert judge.observe_silence(7200.0, ProcessState(state, {1: 6000.0})) is None


def test_a_thread_that_began_in_between_counts_from_its_beginning() -> None:
    judge = FreezeDetector(BOUNDS)
    judge.observe_silence(0.0, ProcessState(ThreadState.RUNNABLE, {1: 500.0}))
    assert judge.observe_silence(1.0, ProcessState(ThreadState.RUNNABLE, {1: 500.0, 2: 0.4})) is None
    assert judge.observe_silence(2.0, ProcessState(ThreadState.RUNNABLE, {2: 1.4})) is None


@pytest.mark.parametrize(
    ("states", "cpu", "words"),
    [
        (ThreadState.STOPPED, 0.0, "stopped by a signal for 20 s"),
        (ThreadState.RUNNABLE, 1.0, "ran for 20 s of processor time and answered nothing in 20 s"),
        (ThreadState.ASLEEP, 0.0, "asleep, and answered nothing in 60 s"),
    ],
)
def test_says_what_was_seen(states: ThreadState, cpu: float, words: str) -> None:
    found = looks(FreezeDetector(BOUNDS), [states] * LONG, cpu=cpu)
    assert found is not None
    assert words in str(found[1])


moments = st.tuples(
    st.sampled_from(list(ThreadState)),
    st.floats(0.0, 1.0),  # share of a processor
    st.floats(0.01, 5000.0),  # seconds since the look before
)


@given(st.lists(moments, max_size=200), st.sets(st.integers(0, 199)))
def test_no_verdict_before_its_bound_after_an_answer(
    history: list[tuple[ThreadState, float, float]], answers: set[int]
) -> None:
    """Whatever the history: since the last answer enough readings were silent to make up the shortest bound."""
    judge, now, cpu, silent = FreezeDetector(BOUNDS), 0.0, 0.0, 0
    for index, (state, share, passed) in enumerate(history):
        now, cpu = now + passed, cpu + share * passed
        if index in answers:
            judge.observe_answer()
            silent = 0
            continue
        silent += 1
        verdict = judge.observe_silence(now, ProcessState(state, {1: cpu}))
        if verdict is not None:
            assert (silent - 1) * BOUNDS.poll_s >= BOUNDS.stopped_s
            assert verdict.seconds <= min(verdict.silent_s, (silent - 1) * BOUNDS.poll_s) + 1e-6
            return


@given(st.lists(st.tuples(st.floats(0.0, 0.02), st.floats(0.05, 30.0)), max_size=300))
def test_who_gets_no_processor_is_never_frozen(history: list[tuple[float, float]]) -> None:
    """Runnable all the time, with a fiftieth of a processor: the bound would take a quarter of an hour of silence."""
    judge, now, cpu, counted = FreezeDetector(BOUNDS), 0.0, 0.0, 0.0
    for share, passed in history:
        now, cpu = now + passed, cpu + share * passed
        counted += min(share * passed, BOUNDS.poll_s)
        if counted < BOUNDS.running_s:
            assert judge.observe_silence(now, ProcessState(ThreadState.RUNNABLE, {1: cpu})) is None


@given(st.lists(moments, max_size=50), st.sampled_from([ThreadState.STOPPED, ThreadState.ASLEEP, ThreadState.RUNNABLE]))
def test_who_stays_frozen_is_found(history: list[tuple[ThreadState, float, float]], state: ThreadState) -> None:
    """Whatever was before, lasting silence in one state ends in a verdict within the longest bound."""
    judge, now, cpu = FreezeDetector(BOUNDS), 0.0, 0.0
    for before, share, passed in history:
        now, cpu = now + passed, cpu + share * passed
        if judge.observe_silence(now, ProcessState(before, {1: cpu})):
            return
    for _ in range(round(BOUNDS.asleep_s / BOUNDS.poll_s) + 2):
        now += BOUNDS.poll_s
        cpu += BOUNDS.poll_s if state is ThreadState.RUNNABLE else 0.0
        if judge.observe_silence(now, ProcessState(state, {1: cpu})):
            return
    raise AssertionError("never found")
