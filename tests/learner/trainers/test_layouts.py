"""Trainings are the same however batches are packed and divided over ranks."""

from __future__ import annotations

import json
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
OBJECTIVES: list[tuple[str, str, dict[str, Any]]] = [
    ("sft", "sft", {}),
    ("rm", "rm", {"loss": {"centering": 0.01}}),
    ("rm", "rm", {"learner": {"lora": {"rank": 4}}}),
    ("dpo", "dpo", {"loss": {"name": "sigmoid", "sft_weight": 0.1}}),
    ("dpo", "dpo", {"loss": {"name": "ipo"}, "learner": {"lora": {"rank": 4}}}),
    ("dpo", "kto", {"loss": {"name": "kto"}}),
]


@pytest.mark.parametrize(("command", "rows", "keys"), OBJECTIVES)
def test_packing_and_ranks_change_nothing(
    command: str,
    rows: str,
    keys: dict[str, Any],
    engine_worlds: GetWorld,
    chat_model: Path,
    row_files: dict[str, Path],
    tmp_path: Path,
) -> None:
    def train(layout: EngineLayout, budget: int) -> np.ndarray:
        cache = tmp_path / f"{layout.name}-{budget}.npy"
        found = engine_worlds(layout).run(layouts.losses, command, chat_model, row_files[rows], cache, keys, budget)
        return np.array(found[0])

    packed = train(ONE, 1 << 14)
    assert len(packed) == layouts.STEPS + 1
    # One example in each micro-batch, and several.
    for budget in (1, 64):
        np.testing.assert_allclose(train(ONE, budget), packed, rtol=2e-5, atol=2e-5)
    for layout in DIVIDED:
        np.testing.assert_allclose(train(layout, 64), packed, rtol=2e-4, atol=2e-4, err_msg=layout.name)


def test_a_row_that_one_rank_cannot_read_ends_all(
    engine_worlds: GetWorld, chat_model: Path, row_files: dict[str, Path], tmp_path: Path
) -> None:
    rows = row_files["rm"].read_text().splitlines()
    bad = tmp_path / "bad.jsonl"
    bad.write_text("\n".join([*rows[:3], json.dumps({"prompt": "1", "chosen": "2" * 40, "rejected": "3"})]))
    told = engine_worlds(DIVIDED[0]).run(layouts.refusals, chat_model, bad)
    assert told == [f"{bad}, row 3: it has 42 tokens, and data.max_tokens is 24"] * 2
