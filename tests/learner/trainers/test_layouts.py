"""Trainings are the same however batches are packed and divided over ranks."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmesh.mesh.config.parallel import ParallelSection
from rollmesh.testing.fixtures import GetWorld
from rollmesh.testing.worlds import EngineLayout
from tests.learner.trainers import layouts

ONE = EngineLayout("one_process")
MEGATRON = EngineLayout("megatron", processes=2, backend="megatron", changes={"parallel": ParallelSection(tp=2)})
DIVIDED = (
    EngineLayout("two_ranks", processes=2),
    EngineLayout("divided_sequences", processes=2, changes={"parallel": ParallelSection(sp=2)}),
    *([MEGATRON] if find_spec("megatron") is not None else []),
)
LAYOUTS = {layout.name: layout for layout in (ONE, *DIVIDED)}
OBJECTIVES: list[tuple[str, str, dict[str, Any]]] = [
    ("sft", "sft", {}),
    ("rm", "rm", {"loss": {"centering": 0.01}}),
    ("rm", "rm", {"learner": {"lora": {"rank": 4}}}),
    ("dpo", "dpo", {"loss": {"name": "sigmoid", "sft_weight": 0.1}}),
    ("dpo", "dpo", {"loss": {"name": "ipo"}, "learner": {"lora": {"rank": 4}}}),
    ("dpo", "kto", {"loss": {"name": "kto"}}),
]
FIRST_TIER = {(0, "two_ranks"), (1, "megatron"), (5, "divided_sequences")}
Train = Callable[[EngineLayout, int, int], np.ndarray]


@pytest.fixture(scope="module")
def train(
    engine_worlds: GetWorld,
    chat_model: Path,
    row_files: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Train:
    """Losses and gradient norms of the training with an objective, by its number, in a layout."""

    @functools.cache
    def trained(layout: str, objective: int, budget: int) -> np.ndarray:
        command, rows, keys = OBJECTIVES[objective]
        cache = tmp_path_factory.mktemp("trained") / "cache.npy"
        world = engine_worlds(LAYOUTS[layout])
        return np.array(world.run(layouts.losses, command, chat_model, row_files[rows], cache, keys, budget)[0])

    return lambda layout, objective, budget: trained(layout.name, objective, budget)


# The others have an adapter too, or a part of what these have.
@pytest.mark.parametrize(
    "objective",
    [pytest.param(at, marks=[pytest.mark.exhaustive] * (at not in (1, 3, 5))) for at in range(len(OBJECTIVES))],
)
# One example in each micro-batch, and several, as ranks have them below.
@pytest.mark.parametrize("budget", [1, pytest.param(64, marks=pytest.mark.exhaustive)])
def test_packing_changes_nothing(train: Train, objective: int, budget: int) -> None:
    packed = train(ONE, objective, 1 << 14)
    assert len(packed) == layouts.STEPS + 1
    np.testing.assert_allclose(train(ONE, objective, budget), packed, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("objective", "layout"),
    [
        # Each form of examples in one of them, each of them with one.
        pytest.param(
            objective,
            layout,
            id=f"{objective}-{layout.name}",
            marks=[pytest.mark.exhaustive] * ((objective, layout.name) not in FIRST_TIER),
        )
        for objective in range(len(OBJECTIVES))
        for place, layout in enumerate(DIVIDED)
    ],
)
def test_ranks_change_nothing(train: Train, objective: int, layout: EngineLayout) -> None:
    np.testing.assert_allclose(
        train(layout, objective, 64), train(ONE, objective, 1 << 14), rtol=2e-4, atol=2e-4, err_msg=layout.name
    )


def test_a_row_that_one_rank_cannot_read_ends_all(
    engine_worlds: GetWorld, chat_model: Path, row_files: dict[str, Path], tmp_path: Path
) -> None:
    rows = row_files["rm"].read_text().splitlines()
    bad = tmp_path / "bad.jsonl"
    bad.write_text("\n".join([*rows[:3], json.dumps({"prompt": "1", "chosen": "2" * 40, "rejected": "3"})]))
    told = engine_worlds(DIVIDED[0]).run(layouts.refusals, chat_model, bad)
    assert told == [f"{bad}, row 3: it has 42 tokens, and data.max_tokens is 24"] * 2
