"""Ids of traces: all services agree on them, and on the traces that are kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollmesh.mesh.telemetry.trace_ids import is_kept, span_of, trajectory_trace, version_trace
from rollmesh.mesh.trajectory.versions import PolicyVersion

names = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=12)
members = st.integers(0, 2**32 - 1)


def test_ids_stay_what_they_were() -> None:
    """Services of two releases, side by side, agree."""
    assert trajectory_trace("run", "g-1-7", 3) == 0x200F1F10BD1F16305F2E21CD82B390AE
    assert span_of(1, "generate", 2) == 0x25B98FBF50DBABDA


@given(st.tuples(names, names, members), st.tuples(names, names, members))
def test_two_trajectories_have_two_traces(first: tuple[str, str, int], second: tuple[str, str, int]) -> None:
    assert (trajectory_trace(*first) == trajectory_trace(*second)) == (first == second)
    assert 0 < trajectory_trace(*first) < 2**128


@given(names, st.integers(0, 2**31), st.integers(0, 2**31))
def test_a_version_has_a_trace_of_its_own(run: str, incarnation: int, version: int) -> None:
    trace = version_trace(run, PolicyVersion(incarnation, version))
    assert trace not in {
        version_trace(run, PolicyVersion(incarnation + 1, version)),
        trajectory_trace(run, run, version),
    }


@given(names, members, st.floats(0, 1), st.floats(0, 1))
def test_a_smaller_share_keeps_a_part_of_the_same_traces(group: str, member: int, one: float, other: float) -> None:
    trace = trajectory_trace("run", group, member)
    small, large = sorted((one, other))
    assert not is_kept(trace, small) or is_kept(trace, large)
    assert is_kept(trace, 1.0)
    assert not is_kept(trace, 0.0)


def test_a_share_is_that_part_of_the_trajectories() -> None:
    kept = sum(is_kept(trajectory_trace("run", f"g-{number}", 0), 0.25) for number in range(10_000))
    assert 2300 < kept < 2700
