"""The choice of roles that stay on a device for a turn, and the memory that a process holds."""

from __future__ import annotations

import mmap

import torch
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.learner.distributed.turn_memory import RoleNeed, held_bytes, resident_roles

NEEDS = {
    "actor": RoleNeed(160, trained=True),
    "critic": RoleNeed(160, trained=True),
    "reference": RoleNeed(40, trained=False),
    "reward": RoleNeed(30, trained=False),
}
ROLES = ["critic", "reference", "reward"]


def resident(budget: int) -> list[str]:
    return sorted(resident_roles(NEEDS, budget, always="actor") - {"actor"})


def test_roles_stay_as_far_as_they_fit_beside_the_largest_that_comes() -> None:
    assert resident(390) == ROLES
    # The critic moves both ways as a whole: it saves more than the other two.
    assert resident(389) == resident(360) == ["critic"]
    assert resident(359) == resident(350) == ["reward"]
    assert resident(349) == resident(320) == []


def test_only_the_actor_stays_where_nothing_fits() -> None:
    assert resident(0) == []


@given(
    st.dictionaries(st.sampled_from(ROLES), st.builds(RoleNeed, st.integers(0, 100), st.booleans())),
    st.integers(0, 100),
    st.integers(0, 500),
)
def test_a_choice_fits_or_is_the_actor_alone(others: dict[str, RoleNeed], actor: int, budget: int) -> None:
    needs = {"actor": RoleNeed(actor, trained=True), **others}
    stay = resident_roles(needs, budget, always="actor")
    coming = max((need.nbytes for role, need in needs.items() if role not in stay), default=0)
    assert "actor" in stay
    assert sum(needs[role].nbytes for role in stay) + coming <= budget or stay == {"actor"}
    if sum(need.nbytes for need in needs.values()) <= budget:
        assert all(needs[role].nbytes == 0 for role in needs.keys() - stay)


def test_held_memory_follows_what_a_process_takes() -> None:
    before = held_bytes(torch.device("cpu"))
    # A mapping of its own: the heap may serve a tensor from memory that other tests freed.
    with mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as taken:
        taken.write(b"\1" * len(taken))
        assert held_bytes(torch.device("cpu")) - before > len(taken) // 2
