"""A learner with `learner.deterministic` that is interrupted, and one that is not; called on every rank."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from rollmesh.learner.distributed.trajectories import InlineTrajectories
from rollmesh.learner.distributed.worker import Worker
from rollmesh.learner.engine_specs import compute_deterministically
from rollmesh.learner.engines.interface import Engine
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.testing.worlds import Harness
from tests.learner.dataflow import VERSION, Probe, make_engines, make_groups, make_plan, make_worker

Tensors = dict[str, Tensor]
Outcome = tuple[dict[str, float], Any, dict[str, Tensors]]


def resume(harness: Harness, model: Path, folder: Path) -> tuple[Outcome, Outcome]:
    """Trains the probe on two batches, without and with an end between them.

    Gives of both the metrics of the second batch, the algorithm's state, and this rank's shards and moments by role.
    """
    del harness  # the workers close their engines
    with patch.dict(os.environ):
        compute_deterministically()
        try:
            train, worker, algorithm, engines = _make(model, folder)
            train(0)
            saved = worker.begin_checkpoint(PolicyVersion(1, VERSION + 1), {}).result(240)
            uninterrupted = train(1), algorithm.state(), _state(engines)
            worker.close()
            train, worker, algorithm, engines = _make(model, folder)
            worker.load(saved)
            resumed = train(1), algorithm.state(), _state(engines)
            worker.close()
        finally:
            torch.use_deterministic_algorithms(False)
    return uninterrupted, resumed


def _make(model: Path, folder: Path) -> tuple[Callable[[int], dict[str, float]], Worker, Probe, dict[str, Engine]]:
    """A function that trains a batch by its seed, and the parts that it is made of."""
    algorithm, held = Probe(), InlineTrajectories()
    engines = make_engines(model, algorithm)
    worker = make_worker(algorithm, engines, held, folder, epochs=2, token_budget=40)

    def train(seed: int) -> dict[str, float]:
        groups = make_groups(seed)
        held.set_batch(groups)
        plan = make_plan(groups, token_budget=40, minibatches=2, dp_sizes=worker.dp_sizes)
        worker.prepare(dataclasses.replace(plan, version=VERSION + seed))
        return worker.train(lambda: None).metrics

    return train, worker, algorithm, engines


def _state(engines: dict[str, Engine]) -> dict[str, Tensors]:
    found: dict[str, Tensors] = {}
    for role, engine in engines.items():
        if engine.trained:
            parameters = engine._runner.parameters  # type: ignore[attr-defined]  # of FSDP2
            moments = engine._optimizer.state  # type: ignore[attr-defined]  # of FSDP2
            found[role] = {
                f"{place} {name}": (tensor.to_local() if hasattr(tensor, "to_local") else tensor).clone()
                for place, parameter in enumerate(parameters)
                for name, tensor in {"weight": parameter.detach(), **moments[parameter]}.items()
            }
    return found
