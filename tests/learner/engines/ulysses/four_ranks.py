"""Training of models whose sequences are divided over processes: what each of the processes of a world does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rollmesh.learner.batching.pack import pack
from rollmesh.learner.engines.interface import Engine
from rollmesh.mesh.config.learner import OptimizerSection
from rollmesh.mesh.errors import ConfigError
from rollmesh.testing.worlds import Harness
from tests.learner.engines.models import make_sequences, make_spec
from tests.learner.engines.training import critic_loss, gradients, policy_loss, train_step, weights

# Settings by case; each has a model of its name, but for the critic. Six heads cannot be divided by four.
CASES: dict[str, dict[str, Any]] = {
    "grouped_queries": {},
    "experts": {"activation_checkpointing": True, "sync_once": True},
    "uneven_heads": {},
    "windows": {},
    "critic": {},
}
SIZES = {"grouped_queries": (2, 4), "experts": (2, 4), "uneven_heads": (2,), "windows": (4,), "critic": (2,)}


def train(harness: Harness, models: Path, case: str, sp: int) -> dict[str, Any]:
    """Steps on uneven batches, and the outputs between them; the same on one rank as on four."""
    critic = case == "critic"
    # A larger eps: the first steps of AdamW follow signs, which rounding may change where a gradient is nearly 0.
    optimizer = OptimizerSection(lr=1e-2, eps=1e-4, max_grad_norm=1e9)
    folder = models / ("grouped_queries" if critic else case)
    spec = make_spec(folder, sp=sp, optimizer=optimizer, entropy_gradient=not critic, **CASES[case])
    engine = harness.make(spec, "value_model" if critic else "language_model")
    evidence = engine.probe()
    assert engine.layout.dp_size == engine.layout.processes // sp
    loss = critic_loss if critic else policy_loss(entropy_bonus=0.1)
    seen: dict[str, Any] = {"truth": evidence.truth.outputs, "metrics": []}
    for seed, groups, budget in ((1, 6, 48), (2, 1, 1 << 20)):
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


def refusal(harness: Harness, models: Path, model: str, sp: int) -> str:
    """The error of a model that cannot be divided."""
    try:
        harness.make(make_spec(models / model, sp=sp))
    except ConfigError as error:
        return f"{error.message}; {error.hint}"
    return "not refused"
