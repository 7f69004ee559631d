"""Experts on different ranks: what they change of the contract of engines, on models that are all mixtures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from rollmesh.learner.engines.fsdp2.parallel_requirements import check_parallel
from rollmesh.mesh.config.parallel import ParallelSection
from rollmesh.mesh.errors import ConfigError
from rollmesh.testing.contract_memory import MemoryContract
from rollmesh.testing.contract_state import StateContract
from rollmesh.testing.contract_training import TrainingContract
from rollmesh.testing.engine_cases import ARCHITECTURES, SMALL, save_random
from rollmesh.testing.worlds import EngineLayout

torch.set_num_threads(1)
# Two ranks share each part of the experts.
EXPERTS = EngineLayout("divided_experts", processes=4, changes={"parallel": ParallelSection(ep=2)})
APART = EngineLayout("experts_apart", processes=2, changes={"parallel": ParallelSection(ep=2)})
COPIES = EngineLayout("experts_in_copies", processes=4, changes={"parallel": ParallelSection(ep=2, shards=2)})
ONE = EngineLayout("one_process")


@pytest.fixture(scope="module")
def engine_models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Other models have nothing to divide, and each layer is divided alike."""
    folder = tmp_path_factory.mktemp("mixtures")
    kind, settings = ARCHITECTURES["experts"]
    tied = {"dense": False, "tied": True, "experts": False}
    return {
        name: save_random(
            AutoConfig.for_model(kind, **SMALL | {"num_hidden_layers": 1}, **settings | {"tie_word_embeddings": ties}),
            folder / name,
        )
        for name, ties in tied.items()
    }


class TestExpertParallel(TrainingContract, StateContract):
    """Steps cross ranks at each layer, and tensors are put together from two meshes.

    In `make test` a row of `test_equivalence` has the gradient, with sequences divided too.
    """

    layouts = (EXPERTS,)
    # A copy of the last one has the parts of `APART`.
    also_continued_in = (ONE, COPIES)
    FIRST_TIER = (
        "test_every_process_may_hold_a_part divided_experts-experts",
        "test_another_layout_continues",
    )


class TestMemory(MemoryContract):
    """Experts are a rank's own."""

    layouts = (APART,)
    FIRST_TIER = ("test_memory_is_given_back",)
    larger_model = ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 384})


@pytest.mark.parametrize(
    ("division", "experts", "problem", "hint"),
    [
        ({"ep": 2}, 0, "ep: 2 divides experts, and model 'm' has none", "learner.parallel.ep: 1"),
        ({"ep": 3}, 8, "ep: 3 does not divide the 8 experts of model 'm'", "learner.parallel.ep: 4"),
        ({"ep": 8}, 16, "ep: 8 does not divide the learner's 4 ranks", "learner.parallel.ep: 4"),
        ({"ep": 4, "shards": 2}, 8, "ep: 4 does not divide the 2 shards of a copy", "learner.parallel.ep: 2"),
        ({"etp": 2}, 8, "etp: 2 is for engine megatron", "leave it out"),
    ],
)
def test_a_division_of_experts_that_does_not_work_is_refused(
    division: dict[str, int], experts: int, problem: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        check_parallel(ParallelSection(**division), heads=8, experts=experts, processes=4, name="m")
    assert problem in str(refused.value)
    assert hint in (refused.value.hint or "")


def test_experts_that_are_not_known_yet_are_not_compared() -> None:
    check_parallel(ParallelSection(ep=4), heads=0, experts=None, processes=4, name="m")
