"""Training of models that are divided over four processes, or whose sequences are: the work of each process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rollmesh.learner.batching.pack import pack
from rollmesh.learner.engines.interface import Engine
from rollmesh.mesh.config.learner import OptimizerSection
from rollmesh.mesh.config.parallel import ParallelSection
from rollmesh.mesh.errors import ConfigError
from rollmesh.testing.contract_state import save
from rollmesh.testing.worlds import Harness
from tests.learner.engines.models import make_sequences, make_spec
from tests.learner.engines.training import critic_loss, gradients, policy_loss, train_step, weights

Tensors = dict[str, torch.Tensor]
# Settings by case; each has a model of its name, but for the critic. Six heads cannot be divided by four.
CASES: dict[str, dict[str, Any]] = {
    "grouped_queries": {},
    "experts": {"activation_checkpointing": True, "sync_once": True},
    "uneven_heads": {},
    "windows": {},
    "critic": {},
}
# Sequences over `sp` processes; models over `shards`, with as many copies as there are then.
DIVISIONS: dict[str, tuple[dict[str, int], ...]] = {
    "grouped_queries": ({"shards": 1}, {"sp": 4}, {"shards": 2, "sp": 2}),
    "experts": ({"shards": 2}, {"sp": 2}, {"sp": 4}),
    "uneven_heads": ({"sp": 2},),
    "windows": ({"sp": 4},),
    "critic": ({"sp": 2}, {"shards": 2}),
}
# `TestCopies` has both kinds of division at once.
FIRST_TIER = {"windows": DIVISIONS["windows"][0]}


def train(harness: Harness, models: Path, case: str, division: dict[str, int]) -> dict[str, Any]:
    """Steps on uneven batches, and the outputs between them; the same on one rank as on four."""
    critic = case == "critic"
    # A larger eps: the first steps of AdamW follow signs, which rounding may change where a gradient is nearly 0.
    optimizer = OptimizerSection(lr=1e-2, eps=1e-4, max_grad_norm=1e9)
    folder, parallel = models / ("grouped_queries" if critic else case), ParallelSection(**division)
    spec = make_spec(folder, parallel=parallel, optimizer=optimizer, entropy_gradient=not critic, **CASES[case])
    engine = harness.make(spec, "value_model" if critic else "language_model")
    evidence = engine.probe()
    assert engine.layout.dp_size == engine.layout.processes // division.get("sp", 1)
    loss = critic_loss if critic else policy_loss(entropy_bonus=0.1)
    seen: dict[str, Any] = {"truth": evidence.truth.outputs, "metrics": []}
    for seed, groups, budget in ((1, 4, 48), (2, 1, 1 << 20)):
        result = train_step(engine, seed=seed, loss=loss, groups=groups, token_budget=budget)
        seen["metrics"].append(result.metrics)
        seen.setdefault("gradients", gradients(engine))
    seen["outputs"] = outputs(engine)
    seen["weights"] = weights(engine)
    return seen


def outputs(engine: Engine) -> dict[str, torch.Tensor]:
    """All that a model gives for tokens; some of its ranks predict none of the second batch."""
    batches = [pack(make_sequences(7)), pack(make_sequences(8, groups=1, members=1, longest=1))]
    found = engine.infer(batches, sum_pi_squared=True)
    assert bool(found) == engine.layout.has_results
    names = ("log_probs", "entropy", "sum_pi_squared", "values")
    return {
        f"{name} {number}": values
        for number, output in enumerate(found)
        for name in names
        if (values := getattr(output, name)) is not None
    }


# Optimizers that keep their state in ways of their own.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "8bit": {"state_dtype": "8bit"},
    "bfloat16": {"state_dtype": "bfloat16"},
    "muon": {"name": "muon"},
}


def save_state(harness: Harness, models: Path, kind: str, folder: Path) -> tuple[list[torch.Tensor], Tensors, Tensors]:
    """Takes a step, which an optimizer in few bits rounds stochastically, and writes a checkpoint.

    Gives this process's shards and the moments then, and the weights after another step.
    """
    engine = _with_optimizer(harness, models, kind, shards=2)
    train_step(engine, seed=1)
    save(engine, folder)
    shards = [parameter.to_local().clone() for parameter in engine._runner.parameters]
    return shards, *_moments_and_weights(engine)


def continue_state(harness: Harness, models: Path, kind: str, folder: Path) -> tuple[Tensors, Tensors]:
    """Moments of a checkpoint, as they are kept, and the weights after another step."""
    engine = _with_optimizer(harness, models, kind)
    engine.load_checkpoint(folder)
    return _moments_and_weights(engine)


def _with_optimizer(harness: Harness, models: Path, kind: str, **division: int) -> Any:
    optimizer = OptimizerSection(lr=1e-2, eps=1e-4, **OPTIMIZERS[kind])
    return harness.make(make_spec(models / "one_layer", parallel=ParallelSection(**division), optimizer=optimizer))


def _moments_and_weights(engine: Any) -> tuple[Tensors, Tensors]:
    moments = {
        f"{place} {name}": (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for place, parameter in enumerate(engine._runner.parameters)
        for name, value in engine._optimizer.state[parameter].items()
    }
    train_step(engine, seed=3)
    return moments, weights(engine)


def steps_of_muon(harness: Harness, models: Path, model: str, division: dict[str, int]) -> tuple[Tensors, Tensors]:
    """The weights before and after a step of Muon."""
    muon = OptimizerSection(name="muon", lr=2e-2, max_grad_norm=1e9)
    engine = harness.make(make_spec(models / model, parallel=ParallelSection(**division), optimizer=muon))
    before = weights(engine)
    train_step(engine, seed=1)
    return before, weights(engine)


def refusal(harness: Harness, models: Path, model: str, division: dict[str, int]) -> str:
    """The error of a model that cannot be divided."""
    try:
        harness.make(make_spec(models / model, parallel=ParallelSection(**division)))
    except ConfigError as error:
        return f"{error.message}; {error.hint}"
    return "not refused"
