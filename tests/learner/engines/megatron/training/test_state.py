"""Ranges of the distributed optimizer as boxes of full tensors, and their way to disk and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.learner.engines.megatron.parallel import ParallelPlace, ParallelSizes
from rollmesh.learner.engines.megatron.weight_rules import Form, Geometry, Rule, pieces_of
from rollmesh.mesh.config.parallel import ParallelSection
from rollmesh.testing.engine_cases import assert_same
from rollmesh.testing.fixtures import GetWorld
from rollmesh.testing.worlds import EngineLayout
from tests.learner.engines.megatron.training import state_case

pytestmark = pytest.mark.usefixtures("megatron")
RULES = (
    Rule(("fc1",), ("gate", "up"), Form.GATE_UP),
    Rule(("fc2",), ("down",), Form.COLUMNS),
    Rule(("embedding",), ("words",), Form.VOCABULARY),
    Rule(("experts.{expert}",), ("experts",), Form.EXPERT_GATE_UP),
)
GEOMETRY = Geometry({"gate": (6, 5), "up": (6, 5), "down": (5, 6), "words": (7, 3), "experts": (4, 8, 3)}, 2, 8)


@given(st.data(), st.sampled_from(RULES))
def test_parts_of_all_ranges_fill_the_pieces_once(data: st.DataObject, rule: Rule) -> None:
    # Megatron-Core is not imported where tests are merely collected.
    from rollmesh.learner.engines.megatron.training.state import parts_of

    sizes = ParallelSizes(2, tp=2, ep=2 if rule.form.of_experts else 1)
    place = ParallelPlace(tp=1, ep=1)
    pieces = pieces_of(rule, rule.names_of(1)[0], sizes, place, GEOMETRY)
    local = torch.arange(math.prod(pieces.local_shape), dtype=torch.float32)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(local)), max_size=3)))
    filled = {name: torch.full(shape, -1.0) for name, shape in GEOMETRY.shapes.items()}
    for start, stop in zip([0, *cuts], [*cuts, len(local)], strict=True):
        for part in parts_of(pieces, start, stop):
            assert (filled[part.name][part.box] == -1.0).all(), "filled twice"
            filled[part.name][part.box] = part.view(local[start:stop])
    for piece in pieces.pieces:
        assert torch.equal(filled[piece.hf_name][piece.hf_box], piece.view(local.view(pieces.local_shape)))
    numbers = sum(int((full >= 0).sum()) for full in filled.values())
    assert numbers == sum(math.prod(piece.shape) for piece in pieces.pieces)


# `test_checkpoint_matrix` divides matrices.
@pytest.mark.parametrize(
    ("processes", "parallel"), [(1, {}), pytest.param(2, {"tp": 2}, marks=pytest.mark.exhaustive)], ids=str
)
def test_a_critic_in_half_precision_is_resumed(
    engine_worlds: GetWorld,
    engine_models: Mapping[str, Path],
    tmp_path: Path,
    processes: int,
    parallel: dict[str, int],
) -> None:
    layout = EngineLayout("half", processes, "megatron", {"parallel": ParallelSection(**parallel)})
    expected, found = engine_worlds(layout).run(state_case.resume, engine_models["tied"], tmp_path)[0]
    assert_same(found, expected, 0.0)
