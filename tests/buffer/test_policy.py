"""The pure parts of the contract: gate, lineage, order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollmesh.buffer.policy.batch_selection import Candidate, choose_first, choose_in_order
from rollmesh.buffer.policy.gate import live_limit, version_floor
from rollmesh.buffer.policy.version_ranges import VersionRanges
from rollmesh.mesh.trajectory.lineage import Lineage
from rollmesh.mesh.trajectory.versions import PolicyVersion

small = st.integers(0, 6)


@given(u=small, live=st.integers(0, 40), batch=st.integers(1, 5), staleness=small, serving=small)
def test_live_limit_is_the_floor_solved_for_live_groups(
    u: int, live: int, batch: int, staleness: int, serving: int
) -> None:
    assert (live < live_limit(u, serving, batch, staleness)) == (version_floor(u, live, batch, staleness) <= serving)


def test_on_policy_gate_demands_the_present_version() -> None:
    assert version_floor(u=5, live=3, groups_per_step=4, max_staleness=0) == 5
    assert version_floor(u=5, live=4, groups_per_step=4, max_staleness=0) == 6


@given(
    resumed=st.lists(small, min_size=1, max_size=4),
    tokens=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 8)), min_size=1, max_size=6),
)
def test_ranges_find_the_oldest_token_under_any_lineage(resumed: list[int], tokens: list[tuple[int, int]]) -> None:
    lineage = Lineage(tuple(enumerate(resumed, start=1)))
    versions = [PolicyVersion(min(i, len(resumed)), v) for i, v in tokens]
    ranges = VersionRanges.of(versions)
    assert ranges.oldest(lineage) == min(lineage.effective(v) for v in versions)
    assert str(VersionRanges(str(ranges))) == str(ranges)


def test_discarded_versions_count_the_way_through_the_common_ancestor() -> None:
    lineage = Lineage(((1, 0), (2, 8), (3, 9)))
    assert lineage.effective(PolicyVersion(1, 7)) == 7
    assert lineage.effective(PolicyVersion(1, 10)) == 6
    assert lineage.effective(PolicyVersion(2, 12)) == 6
    assert lineage.effective(PolicyVersion(3, 12)) == 12


def cumulative(deadlines: list[int], version: int, count: int) -> list[int]:
    return [sum(d <= version + i for d in deadlines) for i in range(count)]


@given(
    ready=st.lists(st.integers(0, 3), max_size=8),
    generating=st.lists(st.integers(0, 3), max_size=8),
    batch=st.integers(1, 4),
    free=st.integers(0, 4),
    wanted=st.integers(1, 4),
)
def test_in_order_keeps_room_for_stragglers(
    ready: list[int], generating: list[int], batch: int, free: int, wanted: int
) -> None:
    free = min(free, batch)
    candidates = [Candidate(str(i), d, i) for i, d in enumerate(ready)]
    live = cumulative(ready + generating, 0, 4)
    choice = choose_in_order(candidates, live, version=0, groups_per_step=batch, free=free, wanted=wanted)
    chosen = [int(g) for g in choice.group_ids]
    assert len(chosen) <= min(free, wanted)
    assert chosen == sorted(chosen), "admission order"
    for i, total in enumerate(live):
        before = max(0, total - batch * i)
        left = max(0, before - sum(ready[g] <= i for g in chosen))
        # The bound's demand on this batch is either met, or still fits into the slots left.
        assert left <= max(free - len(chosen), before - len(chosen), 0)


def test_a_straggler_with_room_may_be_overtaken_and_one_without_may_not() -> None:
    ready = [Candidate("a", 5, 1), Candidate("b", 5, 2)]

    def pick(straggler_deadline: int) -> tuple[str, ...]:
        live = cumulative([5, 5, straggler_deadline], 4, 3)
        return choose_in_order(ready, live, version=4, groups_per_step=2, free=2, wanted=2).group_ids

    assert pick(5) == ("a", "b")
    assert pick(4) == ("a",), "one slot stays free for the straggler that must train now"


def test_the_urgent_go_first_where_the_bound_demands_it() -> None:
    ready = [Candidate("early", 9, 1), Candidate("urgent", 4, 2)]
    live = cumulative([9, 4], 4, 6)
    choice = choose_in_order(ready, live, version=4, groups_per_step=1, free=1, wanted=1)
    assert choice.group_ids == ("urgent",)
    assert choice.reserved == 1


def test_fifo_ignores_stragglers_and_leaves_out_what_is_over_the_bound() -> None:
    candidates = [Candidate("late", 9, 3), Candidate("stale", 3, 1), Candidate("first", 9, 2)]
    assert choose_first(candidates, version=4, slots=5).group_ids == ("first", "late")


@given(
    lengths=st.lists(st.integers(1, 30), min_size=6, max_size=30),
    batch=st.integers(1, 3),
    staleness=st.integers(0, 2),
    slots=st.integers(1, 6),
)
def test_in_order_evicts_nothing_and_never_stalls(lengths: list[int], batch: int, staleness: int, slots: int) -> None:
    """A whole run in miniature: groups of different lengths, gate and order as in production, one tick per step."""
    waiting = list(enumerate(lengths[: len(lengths) // batch * batch]))
    generating: dict[int, tuple[int, int]] = {}  # seq -> (ticks left, deadline)
    ready: dict[int, int] = {}
    u = trained = tick = 0
    total = len(waiting)
    while trained < total:
        tick += 1
        assert tick < 10_000, "stalled"
        live = len(generating) + len(ready)
        while waiting and len(generating) < slots and live < live_limit(u, u, batch, staleness):
            seq, length = waiting.pop(0)
            generating[seq] = (length, u + staleness)
            live += 1
        for seq, (left, deadline) in list(generating.items()):
            if left == 1:
                del generating[seq]
                ready[seq] = deadline
            else:
                generating[seq] = (left - 1, deadline)
        deadlines = [*ready.values(), *(d for _, d in generating.values())]
        assert all(d >= u for d in deadlines), "a straggler was left behind"
        choice = choose_in_order(
            [Candidate(str(s), d, s) for s, d in ready.items()],
            cumulative(deadlines, u, staleness + 1),
            version=u,
            groups_per_step=batch,
            free=batch,
            wanted=batch,
        )
        if len(choice.group_ids) == batch:
            for name in choice.group_ids:
                del ready[int(name)]
            trained += batch
            u += 1
