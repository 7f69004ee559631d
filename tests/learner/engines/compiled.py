"""The work of two ranks in which layers are compiled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollmesh.learner.engines.fsdp2.preparation import compilation
from rollmesh.mesh.runtime.memory_tuning import freeze_heap
from rollmesh.testing.engine_cases import make_sequences, make_spec, train, weights
from rollmesh.testing.worlds import Harness

Tensors = dict[str, torch.Tensor]


def step(harness: Harness, model: Path) -> tuple[Tensors, Tensors, int]:
    """Weights after a step without and with compiled layers, and how many graphs were compiled."""
    graphs = 0

    def counted(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        """Captured and divided as for inductor, and then computed operation by operation: in seconds."""
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilation, "_BACKEND", counted)
        torch._dynamo.reset()
        for choice in (False, True):
            assert not graphs
            engine = harness.make(make_spec(model, param_dtype="bfloat16", compile=choice))
            train(engine, make_sequences(1))
            found.append(weights(engine))
        torch._dynamo.reset()
    # The compiler stays imported; engines of later tests search for garbage when they close, and not in it.
    freeze_heap()
    return found[0], found[1], graphs
