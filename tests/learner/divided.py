"""An engine whose one replica several processes share, and a learner whose models are laid out in different ways.

Every process computes the whole replica, as those of a tensor-parallel group would together. Results arise in the last
one alone, as in the last stage of a pipeline.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from rollmesh.learner.algorithms.interface import Loss
from rollmesh.learner.algorithms.types import GlobalCounts, ModelOutput
from rollmesh.learner.batching.types import PackedBatch
from rollmesh.learner.engines.fsdp2.create import create_engine
from rollmesh.learner.engines.interface import ACTOR, Engine, EngineSpec
from rollmesh.learner.engines.layout import Layout
from rollmesh.learner.engines.pending_step import PendingStep
from rollmesh.learner.engines.registry import ModelType
from rollmesh.learner.engines.world import World
from rollmesh.testing.worlds import Harness
from tests.learner.dataflow import OPTIMIZER, Probe, make_groups, make_plan, make_worker, weights
from tests.learner.engines.models import make_spec


def make_divided(spec: EngineSpec, model_type: ModelType = "language_model") -> Engine:
    """An engine of one replica over all processes; collective."""
    with patch.dict(os.environ, {"WORLD_SIZE": "1", "RANK": "0"}):
        engine: Any = create_engine(spec, model_type)
    engine.world = engine._runner.world = world = World("cpu", need_group=False)
    engine.layout = layout = Layout(0, (world.processes - 1,), world.process, world.processes)
    accumulate, infer = engine.accumulate, engine.infer

    def accumulate_replica(batches: Sequence[PackedBatch], loss: Loss, counts: GlobalCounts) -> None:
        # The runner's layout is that of one process: nothing sums the gradients, so each needs all of the loss.
        accumulate(batches, loss, counts)
        if not layout.has_results:
            held = engine._step.pending
            engine._step.pending = PendingStep(torch.zeros(()), counted=held.counted, computed=held.computed)

    def infer_replica(batches: Sequence[PackedBatch], **how: Any) -> list[ModelOutput]:
        outputs: list[ModelOutput] = infer(batches, **how)
        return outputs if layout.has_results else []

    engine.accumulate, engine.infer = accumulate_replica, infer_replica
    return engine


def train_probe(
    harness: Harness, model: Path, folder: Path, divided: Sequence[str]
) -> tuple[dict[str, dict[str, Tensor]], dict[str, float], Any]:
    """Trains the probe with some roles' engines divided over all processes, the others data-parallel."""
    algorithm, groups = Probe(), make_groups()
    kinds: dict[str, Any] = {ACTOR: ("language_model", True)}
    kinds |= {role.name: (role.kind, role.trained) for role in algorithm.needs.roles}
    engines: dict[str, Engine] = {}
    for role, (kind, trained) in kinds.items():
        spec = make_spec(model, optimizer=OPTIMIZER if trained else None)
        engines[role] = make_divided(spec, kind) if role in divided else harness.make(spec, kind)
    worker = make_worker(algorithm, engines, groups, folder, epochs=2, token_budget=40)
    worker.prepare(make_plan(groups, token_budget=40, minibatches=2, dp_sizes=worker.dp_sizes))
    result = worker.train(lambda: None)
    seen = {role: weights(engine) for role, engine in engines.items() if engine.trained}
    worker.close()
    return seen, result.metrics, algorithm.state()
