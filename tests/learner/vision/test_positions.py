"""Positions on grids are those of transformers' own code."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

from rollmesh.learner.vision.positions import grid_positions

MERGE = 2


def _theirs(image_tokens: np.ndarray[Any, Any], grids: list[tuple[int, int, int]]) -> np.ndarray[Any, Any]:
    vision = SimpleNamespace(spatial_merge_size=MERGE, tokens_per_second=2)
    model: Any = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    model.get_vision_position_ids = lambda *args, **more: Qwen2_5_VLModel.get_vision_position_ids(model, *args, **more)
    types = torch.from_numpy(image_tokens.astype(np.int32))[None]
    found, _ = Qwen2_5_VLModel.get_rope_index(
        model, torch.zeros_like(types, dtype=torch.int64), types, torch.tensor(grids) if grids else None
    )
    return found[:, 0].numpy()


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4)), max_size=3),
    st.integers(1, 4),
)
def test_they_are_those_of_transformers(parts: list[tuple[int, int, int]], after: int) -> None:
    tokens: list[bool] = []
    grids = []
    for text, height, width in parts:
        tokens += [False] * text + [True] * (height * width)
        grids.append((1, height * MERGE, width * MERGE))
    image_tokens = np.array(tokens + [False] * after)
    np.testing.assert_array_equal(grid_positions(image_tokens, grids, MERGE), _theirs(image_tokens, grids))


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [([0, 1, 1], "fewer at token 1"), ([0, 1, 1, 1, 1, 0, 1], "1 tokens of images after"), ([0, 0], "fewer")],
)
def test_tokens_that_do_not_fit_the_grid_are_refused(tokens: list[int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        grid_positions(np.array(tokens, dtype=bool), [(1, 4, 4)], MERGE)
