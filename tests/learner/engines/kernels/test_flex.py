"""FlexAttention over packed rows gives the exact calls' log-probs: shared prompts, windows and capped scores."""

from __future__ import annotations

import pytest
import torch

from rollmesh.learner.batching.pack import pack
from tests.learner.engines.models import make_engine, make_model, make_sequences
from tests.learner.engines.training import log_probs

torch.set_num_threads(1)


@pytest.mark.parametrize("architecture", [pytest.param("qwen3", marks=pytest.mark.exhaustive), "gemma2"])
def test_log_probs_are_those_of_the_exact_calls(tmp_path, architecture):
    engine = make_engine(make_model(tmp_path / "model", architecture))
    batch = pack(make_sequences(1))
    exact = log_probs(engine, batch)
    engine._runner._kernel = "flex"
    torch.testing.assert_close(log_probs(engine, batch), exact, atol=1e-5, rtol=1e-5)
