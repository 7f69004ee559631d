"""The schedule is a function of the seed, and deals every kind of fault."""

from itertools import islice

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.faults.schedule import ALONE, LINKS, schedule, short
from tests.faults.world import LEARNER

LEASE_S = 4.0


@settings(max_examples=15)
@given(st.integers(0, 2**32))
def test_equal_seeds_give_equal_rounds_and_others_differ(seed: int) -> None:
    first = list(islice(schedule(seed, lease_s=LEASE_S), 80))
    assert first == list(islice(schedule(seed, lease_s=LEASE_S), 80))
    assert first != list(islice(schedule(seed + 1, lease_s=LEASE_S), 80))
    assert list(short(seed, lease_s=LEASE_S)) == list(short(seed, lease_s=LEASE_S))


@settings(max_examples=15)
@given(st.integers(0, 2**32))
def test_every_kind_on_every_sort_of_target_is_dealt_again_and_again(seed: int) -> None:
    rounds = list(islice(schedule(seed, lease_s=LEASE_S), 400))
    times: dict[str, int] = {}
    for fault in (fault for one in rounds for fault in one.faults):
        times[fault.name] = times.get(fault.name, 0) + 1
    for name in ("kill generator", "kill learner", "kill redis", "kill front", "kill reward", "kill_all"):
        assert times[name] >= 3, times
    for name in ("zombie learner", "usurped learner", "rank_kill learner", "stop_long learner", "slow redis"):
        assert times[name] >= 2, times
    for name in ("away_stop learner", "away_stop both fronts", "away_cut learner>front", "away_cut everyone>redis"):
        assert times[name] >= 2, times
    for name in (
        "lost_tail redis",
        "old_snapshot redis",
        "emptied redis",
        "kill_fronts",
        "gil reward",
        "rank_cut learner",
    ):
        assert times[name] >= 2, times
    for edge in ("generator>front", "learner>front", "front>redis", "generators>learner", "generators>reward"):
        assert all(times[f"{kind} {edge}"] >= 2 for kind in ("cut", "blackhole_short", "blackhole_long")), times
    assert any(len(one.faults) == 2 for one in rounds)


@settings(max_examples=15)
@given(st.integers(0, 2**32))
def test_lengths_lie_on_their_side_of_the_lease_and_heavy_faults_come_alone(seed: int) -> None:
    before = None
    for one in islice(schedule(seed, lease_s=LEASE_S), 200):
        for fault in one.faults:
            assert fault.kind not in ALONE or len(one.faults) == 1
            if fault.kind.endswith("_short"):
                assert 0 < fault.lasts_s < LEASE_S
            if fault.kind.endswith("_long"):
                assert fault.lasts_s > LEASE_S
            assert (fault.kind in LINKS) == (not isinstance(fault.target, str))
            if fault.kind.startswith("away_") or fault.kind in ("rank_stop", "rank_dead"):
                assert 0.5 * LEASE_S <= fault.lasts_s <= 3 * LEASE_S
            if fault.kind == "rank_stop":
                assert before is not None, "two ranks have to be started first"
                assert (before.kind, before.target, before.ranks) == ("kill", LEARNER, 2)
            if fault.kind in ("rank_kill", "rank_cut"):
                assert before is not None
                assert before.kind == "rank_dead", "there are two ranks only until one is ended"
        before = one.faults[0]


def test_kinds_can_be_chosen() -> None:
    rounds = islice(schedule(0, lease_s=LEASE_S, kinds=frozenset({"kill"})), 30)
    assert {fault.kind for one in rounds for fault in one.faults} == {"kill"}


def test_faults_wait_for_a_round_of_evaluation_where_there_are_any() -> None:
    def moments(evaluation: bool) -> set[str]:
        rounds = islice(schedule(0, lease_s=LEASE_S, evaluation=evaluation), 200)
        return {fault.moment for one in rounds for fault in one.faults}

    assert moments(evaluation=False) == {"any", "partial"}
    assert moments(evaluation=True) == {"any", "partial", "round"}
