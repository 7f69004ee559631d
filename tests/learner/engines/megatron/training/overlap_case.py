"""Steps whose parameters travel while other things happen, for the processes of a world."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from rollmesh.mesh.config.parallel import MegatronSection
from rollmesh.testing.engine_cases import make_batches, make_sequences, make_spec, policy_loss, weights
from rollmesh.testing.worlds import Harness


def exported(harness: Harness, model: Path, amid: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights directly after steps, without overlap and with it; collective.

    Args:
        harness: of a layout with data-parallel ranks.
        model: folder.
        amid: log-probs are computed amid each step.
    """
    found = []
    for section in (MegatronSection(), MegatronSection(overlap_grad_reduce=True, overlap_param_gather=True)):
        engine = harness.make(make_spec(model, megatron=section))
        for seed in (1, 2):
            batches = make_batches(engine, make_sequences(seed))
            engine.accumulate(batches, policy_loss, engine.global_counts(batches))
            if amid:
                engine.infer(batches)
            engine.apply()
        found.append(weights(engine))
    return found[0], found[1]
