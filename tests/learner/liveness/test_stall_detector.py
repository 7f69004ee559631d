"""When a run stands still: the pure decision, step by step and by its properties."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from rollmesh.learner.liveness.stall_detector import (
    MAX_LOADING_S,
    MAX_OBSERVATION_S,
    MAX_SAMPLING_S,
    LimitExceeded,
    MeshObservation,
    StallDetector,
    Stalled,
    StallEnded,
)

START = MeshObservation(now_s=0.0, moved=1, tokens=0, handovers=0, waits=True, loading=False)


class Looks:
    """A watchdog and the mesh that it looks at, second by second."""

    def __init__(self, stall_s: float = 60, limit_s: float = 1800) -> None:
        self.dog = StallDetector(stall_s=stall_s, limit_s=limit_s)
        self.at = START
        self.dog.observe(START)

    def after(self, seconds: float, **changes: int) -> Stalled | StallEnded | LimitExceeded | None:
        """The first thing told while so many seconds pass, one by one; what changes does so with the first."""
        self.at = replace(self.at, **changes)
        for _ in range(round(seconds)):
            self.at = replace(self.at, now_s=self.at.now_s + 1)
            if told := self.dog.observe(self.at):
                return told
        return None


def test_a_stall_is_told_when_it_begins_then_at_doubling_intervals_and_when_it_is_over() -> None:
    looks = Looks()
    assert looks.after(59) is None
    assert looks.after(1) == Stalled(60, begins=True)
    assert looks.after(1000) == Stalled(120, begins=False)
    assert looks.after(1000) == Stalled(240, begins=False)
    assert looks.dog.stalled_s == 240
    assert looks.after(1, moved=2) == StallEnded(240, by_tokens=False)
    assert (looks.dog.stalled_s, looks.dog.total_s, looks.dog.stalls) == (0, 240, 1)
    assert looks.after(60) == Stalled(60, begins=True), "the next one begins from its own beginning"
    assert (looks.dog.total_s, looks.dog.stalls) == (300, 2)


def test_a_run_that_cannot_go_on_is_told_once() -> None:
    looks = Looks(limit_s=100)
    assert looks.after(60) == Stalled(60, begins=True)
    assert looks.after(40) == LimitExceeded(100)
    assert looks.after(19) is None
    assert looks.after(1) == Stalled(120, begins=False)


def test_without_a_limit_it_goes_on_for_ever() -> None:
    looks = Looks(limit_s=0)
    assert [looks.after(10_000) for _ in range(8)] == [Stalled(60 * 2**n, begins=not n) for n in range(8)]


def test_a_learner_that_is_busy_counts_nothing_but_forgets_nothing_either() -> None:
    """Refused claims bring it back to waiting again and again: that is no progress."""
    looks = Looks()
    for _ in range(5):
        assert looks.after(10, waits=True) is None
        assert looks.after(10_000, waits=False) is None
    assert looks.after(10, waits=True) == Stalled(60, begins=True)


def test_long_answers_are_no_stall_while_tokens_are_sampled() -> None:
    looks = Looks(limit_s=100)
    for tokens in range(1, round(MAX_SAMPLING_S / 50)):
        assert looks.after(50, tokens=tokens) is None


def test_tokens_of_which_nothing_comes_for_an_hour_count_no_longer() -> None:
    looks = Looks(limit_s=100)
    told = [looks.after(10, tokens=n) for n in range(1, round(MAX_SAMPLING_S / 10) + 12)]
    assert [each for each in told if each] == [Stalled(60, begins=True), LimitExceeded(100)]
    assert looks.after(1, moved=2) == StallEnded(110, by_tokens=False)
    assert looks.after(50, tokens=1000) is None
    assert looks.after(50, tokens=1001) is None, "from the next progress on they count again"


def test_tokens_that_are_sampled_again_for_ever_are_no_progress() -> None:
    """A generator that loses its groups over and over: others take them, sample, and lose them in turn."""
    looks = Looks()
    told = [looks.after(5, tokens=7 * n, handovers=n) for n in range(1, 14)]
    assert told[11] == Stalled(60, begins=True)
    assert looks.after(1, moved=2) == StallEnded(65, by_tokens=False)
    assert looks.after(50, tokens=1000) is None
    assert looks.after(50, tokens=1001) is None, "from the next progress on they count again"


def test_generators_that_come_and_go_have_sampled_nothing() -> None:
    looks = Looks()
    looks.after(1, tokens=5000)
    told = [looks.after(4, tokens=tokens) for tokens in (0, 3000, 5000) * 5]
    assert [each for each in told if each] == [Stalled(60, begins=True)]


def test_while_a_first_generator_loads_only_the_limit_stands_still() -> None:
    looks = Looks(limit_s=100)
    assert looks.after(60, loading=True) == Stalled(60, begins=True)
    assert [looks.after(1000) for _ in range(2)] == [Stalled(120, begins=False), Stalled(240, begins=False)]
    assert looks.after(99, loading=False) is None
    assert looks.after(1) == LimitExceeded(340)


def test_a_model_that_never_comes_up_counts_towards_the_limit_in_the_end() -> None:
    looks = Looks(limit_s=100)
    looks.at = replace(looks.at, loading=True)
    while left := MAX_LOADING_S + 99 - looks.at.now_s:
        assert not isinstance(looks.after(left), LimitExceeded)
    assert looks.after(1) == LimitExceeded(MAX_LOADING_S + 100)


def test_a_learner_that_was_stopped_itself_blames_no_one() -> None:
    looks = Looks()
    looks.at = replace(looks.at, now_s=5000.0)
    assert looks.dog.observe(looks.at) is None
    assert looks.after(60 - MAX_OBSERVATION_S) == Stalled(60, begins=True)


steps = st.lists(
    st.tuples(
        st.floats(0, 30),
        st.sampled_from(["nothing", "nothing", "nothing", "progress", "tokens", "handover", "busy", "loading"]),
    ),
    max_size=60,
)


@given(steps=steps, stall_s=st.floats(1, 40), more_s=st.floats(0.1, 80))
def test_what_is_told_is_what_the_waited_seconds_since_the_last_progress_say(
    steps: list[tuple[float, str]], stall_s: float, more_s: float
) -> None:
    """Against a restatement that keeps a list of looks instead of clocks."""
    limit_s = stall_s + more_s
    dog = StallDetector(stall_s=stall_s, limit_s=limit_s)
    look, since = START, [(0.0, False)]
    assert dog.observe(look) is None
    handed = stalled = exceeded = False
    for seconds, what in steps:
        look = replace(
            look,
            now_s=look.now_s + seconds,
            moved=look.moved + (what == "progress"),
            tokens=look.tokens + (what == "tokens"),
            handovers=look.handovers + (what == "handover"),
            waits=what != "busy",
            loading=what == "loading",
        )
        told = dog.observe(look)
        handed = what != "progress" and (handed or what == "handover")
        if what == "progress" or (what == "tokens" and not handed):
            assert (type(told) is StallEnded) == stalled
            since, stalled = [], False
            continue
        if what != "busy":
            since.append((min(seconds, MAX_OBSERVATION_S), look.loading))
        quiet = sum(each for each, _ in since)
        counted = sum(each for each, loading in since if not loading)
        assert not isinstance(told, StallEnded)
        if isinstance(told, Stalled):
            assert quiet >= stall_s - 1e-6
            assert told.begins is not stalled
            stalled = True
        elif isinstance(told, LimitExceeded):
            assert stalled
            assert not exceeded
            assert counted >= limit_s - 1e-6
            exceeded = True
        elif what != "busy":
            assert stalled or quiet < stall_s + 1e-6
            assert exceeded or counted < limit_s + 1e-6
        assert (dog.stalled_s > 0) == stalled
