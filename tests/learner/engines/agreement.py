"""Work of two ranks of which one fails, or comes to another result, where both have to agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rollmesh.learner.algorithms.metrics import Metrics
from rollmesh.learner.algorithms.types import GlobalCounts, LossOutput, ModelOutput, TokenBatch
from rollmesh.learner.batching.types import Packing
from rollmesh.mesh.errors import ConfigError, DataError
from rollmesh.testing.engine_cases import make_sequences, make_spec, policy_loss, train, weights
from rollmesh.testing.worlds import Harness


def export_to_a_full_disk(harness: Harness, model: Path, folder: Path) -> tuple[str, bool]:
    """This rank's error of an export, and whether the engine still gives its weights."""
    engine = harness.make(make_spec(model, timeout_s=240.0))
    with pytest.raises(DataError) as refused:
        engine.export_hf(folder)
    return refused.value.message, bool(weights(engine)) == engine.layout.leads


def probe_with_a_failure(harness: Harness, model: Path) -> tuple[Packing, str]:
    """The packing after a probe in which the second rank alone cannot compute packed sequences, and the reason."""
    engine: Any = harness.make(make_spec(model, timeout_s=240.0))
    runner = engine._runner
    read = runner.read

    def fails(batches: Any) -> Any:
        found = read(batches)
        if engine.layout.process and runner.packing is not Packing.ROWS:
            raise RuntimeError("not on this rank")
        return found

    runner.read = fails
    engine.probe()
    return engine.packing, runner.why_rows


def metrics_of_other_names(harness: Harness, model: Path, where: str) -> tuple[str, str]:
    """The refusal of a loss whose metrics have other names on one rank, or in one micro-batch."""
    engine = harness.make(make_spec(model, timeout_s=240.0))
    calls = 0

    def loss(output: ModelOutput, tokens: TokenBatch, counts: GlobalCounts) -> LossOutput:
        nonlocal calls
        calls += 1
        found = policy_loss(output, tokens, counts)
        odd = calls == 1 if where == "micro-batch" else engine.layout.process == engine.layout.processes - 1
        own = Metrics(sums={"odd": torch.zeros(())} if odd else {}, maxima={"all": torch.zeros(2 if odd else ())})
        return LossOutput(found.loss, found.metrics | own)

    with pytest.raises(ConfigError) as refused:
        train(engine, make_sequences(1), loss, token_budget=24)
    return refused.value.message, refused.value.hint
