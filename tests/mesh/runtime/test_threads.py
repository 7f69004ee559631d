"""Threads: never more than the cores where that is possible, one each otherwise."""

from hypothesis import given
from hypothesis import strategies as st

from rollmesh.mesh.runtime.threads import plan_threads, thread_environment


@given(st.integers(1, 128), st.integers(1, 8), st.integers(0, 8))
def test_no_oversubscription_where_it_can_be_avoided(cores: int, ranks: int, replicas: int) -> None:
    plan = plan_threads(cores, ranks=ranks, replicas=replicas)
    used = ranks * plan.learner + replicas * plan.generator
    assert plan.learner >= 1
    assert plan.generator >= 1
    one_each = plan.learner == 1 or plan.generator == 1 or replicas == 0
    assert used <= cores or one_each


def test_a_laptop() -> None:
    plan = plan_threads(2, ranks=1, replicas=2)
    assert (plan.learner, plan.generator) == (1, 1)
    assert "2 cores" in plan.describe(1, 2)


def test_figures_of_the_user_stand() -> None:
    assert plan_threads(2, ranks=1, replicas=1, learner=2, generator=3).generator == 3
    assert thread_environment(3)["OMP_NUM_THREADS"] == "3"
