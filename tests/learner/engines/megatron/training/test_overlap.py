"""Parameters that travel while other things happen have arrived when weights leave."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from rollmesh.testing.engine_cases import assert_same
from rollmesh.testing.fixtures import GetWorld
from rollmesh.testing.worlds import EngineLayout
from tests.learner.engines.megatron.training import overlap_case


@pytest.mark.parametrize("amid", [False, True], ids=["directly", "after log-probs amid the step"])
def test_weights_that_leave_after_a_step_are_those_of_the_step(
    engine_worlds: GetWorld, engine_models: Mapping[str, Path], amid: bool
) -> None:
    world = engine_worlds(EngineLayout("overlap", 2, "megatron"))
    expected, found = world.run(overlap_case.exported, engine_models["tied"], amid)[0]
    assert_same(found, expected, 1e-6)
