"""Routers of Megatron's model: replay of given experts, and loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rollmesh.mesh.config.parallel import ParallelSection
from rollmesh.testing.engine_cases import assert_same, make_sequences
from rollmesh.testing.fixtures import GetWorld
from rollmesh.testing.worlds import EngineLayout
from tests.learner.engines.experts import router_cases

FSDP2 = EngineLayout("one_process")
SEQUENCES = router_cases.routed(make_sequences(1), 0)


@pytest.fixture(scope="module")
def expected(engine_worlds: GetWorld, engine_models: Mapping[str, Path]) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs with the given experts, and the gradient of the other engine's step."""
    model = engine_models["experts"]
    ((_, gradient),) = engine_worlds(FSDP2).run(router_cases.step, model, {"replay": True}, SEQUENCES, 24, {})
    return router_cases.forced_log_probs(model, SEQUENCES), gradient


@pytest.mark.parametrize(
    ("processes", "parallel"),
    [
        pytest.param(1, {}, marks=pytest.mark.exhaustive),
        pytest.param(2, {"ep": 2}, marks=pytest.mark.exhaustive),
        (2, {"pp": 2}),
        # A row of `test_equivalence`, too.
        pytest.param(2, {"cp": 2}, marks=pytest.mark.exhaustive),
        (2, {"tp": 2, "ep": 2}),
    ],
    ids=str,
)
def test_given_experts_are_chosen_as_by_the_other_engine(
    engine_worlds: GetWorld,
    engine_models: Mapping[str, Path],
    expected: tuple[Tensor, dict[str, Tensor]],
    processes: int,
    parallel: dict[str, int],
) -> None:
    world = engine_worlds(EngineLayout("replayed", processes, "megatron", {"parallel": ParallelSection(**parallel)}))
    model, replay = engine_models["experts"], {"replay": True}
    wanted, gradient = expected
    found = world.run(router_cases.infer, model, replay, SEQUENCES, False)
    (log_probs,) = [each for each in found if each is not None][:1]
    torch.testing.assert_close(log_probs, wanted, atol=1e-5, rtol=1e-5)
    results = world.run(router_cases.step, model, replay, SEQUENCES, 24, {"activation_checkpointing": True})
    assert_same(results[0][1], gradient)
    for result, _ in results:
        assert 0.7 < result.metrics["router_drift"] < 0.95
        assert 0.7 < result.metrics["router_replayed"] < 1.0
        assert result.metrics["expert_load_max"] >= 1.0
