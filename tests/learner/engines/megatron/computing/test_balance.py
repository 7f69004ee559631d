"""Losses of routers are means over all tokens, whatever divides them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from rollmesh.mesh.config.parallel import ParallelSection
from rollmesh.testing.engine_cases import assert_same, make_sequences
from rollmesh.testing.fixtures import GetWorld
from rollmesh.testing.worlds import EngineLayout
from tests.learner.engines.experts import router_cases
from tests.learner.engines.megatron.computing import balance_case


@pytest.mark.parametrize(
    ("processes", "parallel"),
    [
        (1, {}),
        pytest.param(2, {"tp": 2}, marks=pytest.mark.exhaustive),
        # These two are rows of `test_equivalence`, too.
        pytest.param(2, {"cp": 2}, marks=pytest.mark.exhaustive),
        pytest.param(2, {"pp": 2}, marks=pytest.mark.exhaustive),
        (2, {"tp": 2, "ep": 2}),
    ],
    ids=str,
)
def test_losses_of_routers_are_those_of_plain_torch(
    engine_worlds: GetWorld, engine_models: Mapping[str, Path], processes: int, parallel: dict[str, int]
) -> None:
    layout = EngineLayout("balanced", processes, "megatron", {"parallel": ParallelSection(**parallel)})
    model, sequences = engine_models["experts"], make_sequences(1)
    balance, logits, gradient = router_cases.losses(model, sequences, balance_case.LOGITS)
    router = {"load_balance_coeff": balance_case.BALANCE, "z_loss_coeff": balance_case.LOGITS}
    for result, found in engine_worlds(layout).run(router_cases.step, model, router, sequences, 24, {}):
        assert result.metrics["load_balance_loss"] == pytest.approx(balance, rel=1e-5)
        assert result.metrics["router_z_loss"] == pytest.approx(logits, rel=1e-5)
        if found:
            assert_same(found, gradient)


ALONE = EngineLayout("balanced", 1, "megatron")


def test_models_have_losses_of_their_own_routers(engine_worlds: GetWorld, engine_models: Mapping[str, Path]) -> None:
    ((alone, first, second),) = engine_worlds(ALONE).run(balance_case.beside_another, engine_models["experts"])
    assert first == second == pytest.approx(alone)


def test_a_continued_run_balances_by_the_loads_of_its_last_step(
    engine_worlds: GetWorld, engine_models: Mapping[str, Path], tmp_path: Path
) -> None:
    ((whole, continued),) = engine_worlds(ALONE).run(router_cases.continued, engine_models["experts"], tmp_path)
    assert_same(continued, whole)


def test_a_step_in_parts_has_the_same_weight_of_these_losses(
    engine_worlds: GetWorld, engine_models: Mapping[str, Path]
) -> None:
    ((whole, parts),) = engine_worlds(ALONE).run(balance_case.in_parts, engine_models["experts"])
    # Parts are weighted by their trained tokens, and computed ones are not quite in proportion.
    assert parts == pytest.approx(whole, rel=0.1)


def test_the_probe_leaves_these_losses_out(engine_worlds: GetWorld, engine_models: Mapping[str, Path]) -> None:
    ((gradient),) = engine_worlds(ALONE).run(balance_case.probe, engine_models["experts"])
    assert gradient is not None
    assert gradient < 1e-4
