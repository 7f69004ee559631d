"""Settings that an engine does not use are named when a run starts."""

from __future__ import annotations

import pytest

from rollmesh.learner.builders import build_algorithm
from rollmesh.learner.notices import notices
from rollmesh.mesh.config import load_config

GIVEN = ("learner.gradient_sync=step", "learner.memory.reshard_after_forward=false")
MEGATRON = "learner.engine=megatron"


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ((MEGATRON,), []),
        ((MEGATRON, *GIVEN), ["learner.gradient_sync step", "learner.memory.reshard_after_forward false"]),
        (GIVEN, []),
        # A role of the other engine uses them.
        ((MEGATRON, *GIVEN, "learner.roles.reference.engine=fsdp2"), []),
    ],
)
def test_settings_of_other_engines_are_without_effect(overrides: tuple[str, ...], named: list[str]) -> None:
    settings = {"model": {"path": "m"}, "data": {"train": "t"}, "algorithm": {"name": "ppo", "kl": {"where": "loss"}}}
    config = load_config(settings, list(overrides))
    found = [notice for notice in notices(config, build_algorithm(config)) if "effect: learner." in notice]
    assert [notice.partition(". ")[0] for notice in found] == [f"without effect: {name}" for name in named]
