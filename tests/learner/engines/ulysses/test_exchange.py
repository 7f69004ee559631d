"""Processes that divide sequences give the outputs, gradients and weights of one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.learner.tiny_models import save_model
from rollmesh.testing.fixtures import GetWorld
from rollmesh.testing.worlds import EngineLayout
from tests.learner.engines.models import make_model
from tests.learner.engines.test_gradients import assert_same
from tests.learner.engines.ulysses.four_ranks import CASES, SIZES, refusal, train

torch.set_num_threads(1)

ONE, FOUR_RANKS = EngineLayout("one_process"), EngineLayout("four_ranks", processes=4)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ulysses")
    make_model(folder / "grouped_queries", "qwen3")
    make_model(folder / "experts", "qwen3_moe")
    make_model(folder / "windows", "gemma2")
    make_model(folder / "state", "lfm2")
    save_model(folder / "uneven_heads", "qwen3", num_attention_heads=6, num_key_value_heads=3)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_divided_sequences_give_the_results_of_whole_ones(models: Path, engine_worlds: GetWorld, case: str) -> None:
    (alone,) = engine_worlds(ONE).run(train, models, case, 1)
    for sp in SIZES[case]:
        divided = engine_worlds(FOUR_RANKS).run(train, models, case, sp)[0]
        assert divided["truth"] < 1e-5
        assert_same(divided["gradients"], alone["gradients"])
        assert_same(divided["outputs"], alone["outputs"])
        assert_same(divided["weights"], alone["weights"])
        for found, expected in zip(divided["metrics"], alone["metrics"], strict=True):
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_models_that_cannot_be_divided_are_refused_with_the_nearest_number(
    models: Path, engine_worlds: GetWorld
) -> None:
    world = engine_worlds(FOUR_RANKS)
    for heads in world.run(refusal, models, "uneven_heads", 4):
        assert "learner.parallel.sp: 4 does not divide the 6 attention heads" in heads
        assert heads.endswith("set learner.parallel.sp: 2, the nearest that divides both")
    for state in world.run(refusal, models, "state", 2):
        assert "carry a state" in state
        assert state.endswith("set learner.parallel.sp: 1")
