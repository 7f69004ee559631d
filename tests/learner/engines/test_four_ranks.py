"""Processes that divide a model or its sequences give the outputs, gradients and weights of one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from benchmarks.learner.tiny_models import save_model
from rollmesh.mesh.config.parallel import ParallelSection
from rollmesh.testing.contract_state import StateContract
from rollmesh.testing.contract_training import TrainingContract
from rollmesh.testing.fixtures import GetWorld
from rollmesh.testing.worlds import EngineLayout
from tests.learner.engines.four_ranks import (
    CASES,
    DIVISIONS,
    FIRST_TIER,
    OPTIMIZERS,
    continue_state,
    refusal,
    save_state,
    steps_of_muon,
    train,
)
from tests.learner.engines.models import make_model, one_layer_models
from tests.learner.engines.test_gradients import assert_same

torch.set_num_threads(1)

ONE, TWO_RANKS = EngineLayout("one_process"), EngineLayout("two_ranks", processes=2)
FOUR_RANKS = EngineLayout("four_ranks", processes=4)
# Both at once, for the time of one: a mistake of either shows.
COPIES = EngineLayout("sequences_in_copies", processes=4, changes={"parallel": ParallelSection(shards=2, sp=2)})
# A moment of each optimizer, and its kind.
KEPT = {
    "8bit": ("exp_avg", torch.uint8),
    "bfloat16": ("exp_avg", torch.bfloat16),
    "muon": ("momentum_buffer", torch.float32),
}


@pytest.fixture(scope="module")
def engine_models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Models of one layer: each is divided alike."""
    return one_layer_models(tmp_path_factory.mktemp("one-layer"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("divided")
    make_model(folder / "grouped_queries", "qwen3")
    make_model(folder / "one_layer", "qwen3", num_hidden_layers=1)
    make_model(folder / "experts", "qwen3_moe")
    # Its layer has a window; `TestCopies` has full attention.
    make_model(folder / "windows", "gemma2", num_hidden_layers=1, layer_types=["sliding_attention"])
    make_model(folder / "state", "lfm2")
    uneven = {
        "hidden_size": 36,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 6,
        "num_hidden_layers": 1,
    }
    save_model(folder / "uneven_experts", "qwen3_moe", **uneven, num_experts=3, moe_intermediate_size=12)
    save_model(folder / "uneven_heads", "qwen3", num_attention_heads=6, num_key_value_heads=3)
    return folder


@pytest.mark.parametrize(
    ("case", "division"),
    [
        pytest.param(case, division, marks=[pytest.mark.exhaustive] * (division is not FIRST_TIER.get(case)))
        for case in CASES
        for division in DIVISIONS[case]
    ],
)
def test_what_is_divided_gives_the_results_of_one_process(
    models: Path, engine_worlds: GetWorld, case: str, division: dict[str, int]
) -> None:
    (alone,) = engine_worlds(ONE).run(train, models, case, {})
    divided = engine_worlds(FOUR_RANKS).run(train, models, case, division)[0]
    assert divided["truth"] < 1e-5
    assert_same(divided["gradients"], alone["gradients"])
    assert_same(divided["outputs"], alone["outputs"])
    assert_same(divided["weights"], alone["weights"])
    for found, expected in zip(divided["metrics"], alone["metrics"], strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)


class TestCopies(TrainingContract, StateContract):
    """A model's copies train as one, and leave as one; two processes of each divide a micro-batch's sequences."""

    layouts = (COPIES,)
    also_continued_in = (ONE, TWO_RANKS, FOUR_RANKS)
    FIRST_TIER = (
        "test_a_gradient_is_that_of_plain_forward_passes tied-ranks with different",
        "test_copies_stay_the_same_and_are_saved_once 8bit",
    )

    @pytest.mark.parametrize("kind", OPTIMIZERS)
    def test_copies_stay_the_same_and_are_saved_once(
        self, models: Path, engine_worlds: GetWorld, kind: str, tmp_path: Path
    ) -> None:
        """Moments as each optimizer keeps them, which any other number of shards reads as they were written."""
        leading, *others = engine_worlds(FOUR_RANKS).run(save_state, models, kind, tmp_path)
        _, moments, expected = leading
        seen = [shards for shards, *_ in (leading, *others)]
        for ours, theirs in zip(seen[:2], seen[2:], strict=True):
            assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
        named = FileSystemReader(tmp_path).read_metadata().storage_data.values()
        assert sum(part.length for part in named) == sum(path.stat().st_size for path in tmp_path.glob("*.distcp"))
        assert KEPT[kind] in {(name.split()[1], moment.dtype) for name, moment in moments.items()}
        for layout in (ONE, FOUR_RANKS):
            read, found = engine_worlds(layout).run(continue_state, models, kind, tmp_path)[0]
            assert_same(read, moments, 0.0)
            # Muon multiplies in bfloat16.
            assert_same(found, expected, 1e-3 if kind == "muon" else 1e-5)


@pytest.mark.parametrize(
    "division",
    [pytest.param({}, marks=pytest.mark.exhaustive, id="shards"), pytest.param({"shards": 2}, id="copies")],
)
def test_muon_takes_the_steps_of_one_process_where_shards_differ_in_rows_and_experts(
    models: Path, engine_worlds: GetWorld, division: dict[str, int]
) -> None:
    """Stacks of three experts, matrices of 3, 6 and 18 rows: one of four ranks has none of some."""
    ((before, expected),) = engine_worlds(ONE).run(steps_of_muon, models, "uneven_experts", {})
    (_, found), *_ = engine_worlds(FOUR_RANKS).run(steps_of_muon, models, "uneven_experts", division)
    assert_same(found, expected, 1e-3)
    for name, tensor in expected.items():
        assert tensor.dim() < 2 or float((tensor - before[name]).abs().max()) > 3e-3, name


def test_models_that_cannot_be_divided_are_refused_with_the_nearest_number(
    models: Path, engine_worlds: GetWorld
) -> None:
    world = engine_worlds(FOUR_RANKS)
    for heads in world.run(refusal, models, "uneven_heads", {"sp": 4}):
        assert "learner.parallel.sp: 4 does not divide the 6 attention heads" in heads
        assert heads.endswith("set learner.parallel.sp: 2, the nearest that divides both")
    for state in world.run(refusal, models, "state", {"sp": 2}):
        assert "carry a state" in state
        assert state.endswith("set learner.parallel.sp: 1")
    for undivided in world.run(refusal, models, "state", {"shards": 3}):
        assert undivided.startswith("learner.parallel.shards: 3 does not divide the learner's 4 ranks; set ")
        assert "learner.parallel.shards: 4, the nearest" in undivided
