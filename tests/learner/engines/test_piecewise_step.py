"""The optimizer's step with a state in host memory: piece by piece, to the results of a whole step."""

from __future__ import annotations

import pytest
import torch

from rollmesh.testing.worlds import EngineLayout
from tests.learner.engines import two_ranks
from tests.learner.engines.two_ranks import OPTIMIZERS

torch.set_num_threads(1)

ONE, TWO = EngineLayout("one_process"), EngineLayout("two_ranks", processes=2)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        # Each kind in one layout: on two ranks the one whose step exchanges tensors.
        pytest.param(
            kind,
            layout,
            id=f"{kind}-{layout.name}",
            marks=[pytest.mark.exhaustive] * ((layout is TWO) != (kind == "muon")),
        )
        for kind in OPTIMIZERS
        for layout in (ONE, TWO)
    ],
)
def test_a_step_by_pieces_is_a_whole_step_bit_by_bit(engine_worlds, engine_models, layout, kind):
    """From the first step on, which makes the state; and only two pieces of it are ever on the device."""
    for whole, by_pieces in engine_worlds(layout).run(two_ranks.step_by_pieces, engine_models["experts"], kind):
        assert whole.tensors.keys() == by_pieces.tensors.keys()
        for name, tensor in whole.tensors.items():
            assert torch.equal(by_pieces.tensors[name], tensor), name
        assert whole.most == whole.state
        assert by_pieces.most <= by_pieces.two_pieces < whole.state
        assert by_pieces.after == 0
