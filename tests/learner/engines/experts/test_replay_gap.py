"""Router replay closes most of the gap to a generator that rounds: the smallest row of the table in docs/moe.md."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.engines.router_replay import measure


# In `make test`, `test_routers` compares log-probs of the experts that a generator has chosen.
@pytest.mark.exhaustive
def test_log_probs_are_nearer_to_those_of_a_generator_in_half_precision(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    settings = {"num_hidden_layers": 4, "num_experts": 32, "num_experts_per_tok": 4}
    drift, own, largest, far, replayed, largest_replayed, far_replayed = (
        float(cell.rstrip("%")) for cell in measure(tmp_path, settings, "bfloat16")
    )
    assert 0.5 < drift < 10.0
    assert replayed < 0.6 * own
    assert largest_replayed < 0.4 * largest
    assert far_replayed < 0.2 * far
    assert replayed == pytest.approx(0.014, rel=0.5)
