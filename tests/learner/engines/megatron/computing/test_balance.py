"""Losses of routers are means over all tokens, whatever divides them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from rollmesh.mesh.config.parallel import ParallelSection
from rollmesh.testing.engine_cases import assert_same
from rollmesh.testing.fixtures import GetWorld
from rollmesh.testing.worlds import EngineLayout
from tests.learner.engines.megatron.computing import balance_case


@pytest.mark.parametrize(
    ("processes", "parallel"),
    [
        (1, {}),
        (2, {"tp": 2}),
        (2, {"cp": 2}),
        (2, {"pp": 2}),
        (2, {"tp": 2, "ep": 2}),
    ],
    ids=str,
)
def test_losses_of_routers_are_those_of_plain_torch(
    engine_worlds: GetWorld, engine_models: Mapping[str, Path], processes: int, parallel: dict[str, int]
) -> None:
    layout = EngineLayout("balanced", processes, "megatron", {"parallel": ParallelSection(**parallel)})
    balance, logits, gradient = balance_case.expected(engine_models["experts"])
    for result, found in engine_worlds(layout).run(balance_case.step, engine_models["experts"]):
        assert result.metrics["load_balance_loss"] == pytest.approx(balance, rel=1e-5)
        # Processes average their own tokens' first, and have not all as many.
        assert result.metrics["router_z_loss"] == pytest.approx(logits, rel=1e-2)
        if found:
            assert_same(found, gradient)
