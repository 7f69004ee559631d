"""KTO's estimate of the divergence between a step's policy and the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollmesh.learner.data.examples import Example, sequence_from
from rollmesh.learner.trainers.objectives import kto
from rollmesh.mesh.config.trainers.sections import PreferenceSection


def test_the_divergence_is_the_mean_over_mismatched_pairs_and_never_negative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kto, "build_batch", lambda pairs, engine, budget: pairs)
    sums = iter([[-1.0, -2.0], [-4.0, -5.0]])
    monkeypatch.setattr(kto, "sequence_log_probs", lambda engine, batch: torch.tensor(next(sums)))
    examples = [Example((sequence_from([1], [2], [1]),), {kto.MISMATCHED: (-2.0,)}) for _ in range(2)]
    loss = kto.KtoLoss(PreferenceSection(name="kto"), longest=8)
    engine: Any = None
    found = []
    batches: list[list[Example | None]] = [[None, None], [examples[0], None, examples[1]], [*examples]]
    for batch in batches:
        assert loss.begin(engine, batch, 64) is batch
        found.append(loss._divergence)
    assert found == [0.0, 0.5, 0.0]
