"""Threads: never more than the cores where that is possible, one each otherwise."""

from hypothesis import given
from hypothesis import strategies as st

from rollmesh.mesh.runtime.threads import plan_rank_threads, plan_threads, thread_environment


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


@given(st.integers(1, 128), st.integers(1, 8), st.integers(1, 8))
def test_in_turns_each_side_has_all_cores(cores: int, ranks: int, replicas: int) -> None:
    plan = plan_threads(cores, ranks=ranks, replicas=replicas, in_turns=True)
    assert plan.learner == max(1, cores // ranks)
    assert plan.generator == max(1, cores // replicas)


def test_generators_in_addition_have_the_learners_cores() -> None:
    plan = plan_threads(16, ranks=2, replicas=2, shared=4)
    assert (plan.learner, plan.generator, plan.shared) == (4, 4, 2)
    assert plan.describe(2, 2, 4).endswith("generators 2 x 4 thread(s), those on the learner's cores 4 x 2 thread(s)")


def test_numbers_of_the_user_stand() -> None:
    assert plan_threads(2, ranks=1, replicas=1, learner=2, generator=3).generator == 3
    assert thread_environment(3)["OMP_NUM_THREADS"] == "3"


def test_ranks_without_generators_have_all_cores() -> None:
    plan = plan_rank_threads(8, {"LOCAL_WORLD_SIZE": "4"})
    assert plan.describe(4, 0) == "8 cores: learner 4 x 2 thread(s)"
    assert plan_rank_threads(8, {}).learner == 8
    assert plan_rank_threads(8, {"OMP_NUM_THREADS": "3"}).learner == 3
    assert plan_rank_threads(8, {"OMP_NUM_THREADS": "3,2"}).learner == 3, "one for each level of nesting"
