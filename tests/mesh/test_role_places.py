"""Places of roles: the learner's processes, or their own with layouts of their own."""

from __future__ import annotations

import pytest

from rollmesh.mesh.config import load_config
from rollmesh.mesh.config.learner import LearnerSection
from rollmesh.mesh.errors import ConfigError


def learner(*overrides: str) -> LearnerSection:
    return load_config({"model": {"path": "m"}, "data": {"train": "t.jsonl"}}, overrides).learner


def test_a_role_apart_has_ranks_of_its_own_and_does_not_inherit_the_learners_division() -> None:
    found = learner(
        "learner.ranks=4",
        "learner.parallel.sp=2",
        "learner.roles.critic={at: own, ranks: 2}",
        "learner.roles.teacher={at: elsewhere}",
        "learner.roles.reference={offload: true}",
    )
    names = ("actor", "critic", "teacher", "reference")
    assert [found.ranks_of(name) for name in names] == [4, 2, 1, 4]
    assert [found.parallel_of(name).sp for name in names] == [2, None, None, 2]
    assert [found.is_apart(name) for name in names] == [False, True, True, False]
    assert found.own_roles == ["critic"]


def test_a_replay_has_all_roles_in_its_own_processes() -> None:
    found = learner("learner.ranks=4", "learner.roles.critic={at: own, ranks: 2, engine: megatron}")
    here = found.with_all_roles_here()
    assert (here.is_apart("critic"), here.ranks_of("critic")) == (False, 4)
    assert here.engine_of("critic") == "megatron"


def test_ranks_without_processes_of_their_own_are_refused() -> None:
    with pytest.raises(ConfigError, match="set at to own or elsewhere"):
        learner("learner.roles.critic={ranks: 2}")
