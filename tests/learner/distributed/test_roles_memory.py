"""All roles' memory away and back on every rank, and the policy's log-probs of one sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollmesh.mesh.config.parallel import ParallelSection
from rollmesh.testing.engine_cases import assert_same
from rollmesh.testing.fixtures import GetWorld
from rollmesh.testing.worlds import EngineLayout
from tests.learner import turns
from tests.learner.engines.models import make_model

TWO_RANKS = EngineLayout("two_ranks", 2)
LAYOUTS = [
    EngineLayout("one_process"),
    TWO_RANKS,
    EngineLayout("sp2", 2, changes={"parallel": ParallelSection(sp=2)}),
    EngineLayout("tp2", 2, "megatron", {"parallel": ParallelSection(tp=2)}),
    EngineLayout("pp2", 2, "megatron", {"parallel": ParallelSection(pp=2)}),
    EngineLayout("cp2", 2, "megatron", {"parallel": ParallelSection(cp=2)}),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_model(tmp_path_factory.mktemp("model") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def seen(engine_worlds: GetWorld, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("turns")
    model = make_model(tmp_path_factory.mktemp("small") / "qwen3", "qwen3", num_hidden_layers=1)
    first, _ = engine_worlds(TWO_RANKS).run(turns.take_turns, model, folder)
    return first | {"left": list((folder / "resting").iterdir())}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, id=layout.name, marks=[pytest.mark.exhaustive] * (layout.name in ("one_process", "cp2")))
        for layout in LAYOUTS
    ],
)
def test_log_probs_of_a_sequence_are_those_of_transformers_on_every_rank(
    model: Path, engine_worlds: GetWorld, tmp_path: Path, layout: EngineLayout
) -> None:
    ids = torch.from_numpy(turns.SEQUENCE).long()[None]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(ids).logits[0, :-1]
    expected = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0].numpy()
    for found in engine_worlds(layout).run(turns.log_probs, model, tmp_path):
        assert (found.dtype, found.shape) == (np.float32, (ids.shape[1] - 1,))
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_batches_train_the_same_with_a_turn_of_others_between(seen: Any) -> None:
    untouched, turning = seen["weights"]
    for role, expected in untouched.items():
        assert_same(turning[role], expected, 0.0)
    before, after = seen["log_probs"]
    assert np.array_equal(before, after)


def test_all_roles_are_away_and_orders_that_need_them_are_refused(seen: Any) -> None:
    trained = ["optimizer", "params"]
    assert seen["away"] == {"actor": trained, "critic": trained, "reference": ["params"], "scorer": trained}
    assert seen["freed"] >= 0
    assert len(seen["while away"]) == 4
    assert all("away from the devices" in message for message in seen["while away"])
    assert not seen["left"]


def test_where_memory_is_tight_roles_come_for_their_phases_alone(seen: Any) -> None:
    assert seen["resting"] == {
        "actor": [],
        "critic": ["optimizer", "params"],
        "reference": ["params"],
        "scorer": ["optimizer", "params"],
    }
    assert not any(seen["back"][1].values()), "with room for all, what rested before comes too"


def test_what_one_rank_has_no_room_for_all_ranks_keep(seen: Any) -> None:
    assert seen["refused"].startswith("SwapError: the learner's state cannot leave the devices: rank 1: ")
    assert "File too large" in seen["refused"]
    assert seen["refused"].count("placement.rest_dir") == 1
    assert seen["back"][0] == seen["away"], "it leaves once there is room"


def test_what_cannot_come_back_counts_as_away(seen: Any) -> None:
    failed, refused = seen["stuck"]
    assert "File too large" in failed
    assert "rank 1: no room" in failed
    assert "away from the devices" in refused
