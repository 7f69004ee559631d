"""Steps with losses of routers, for the processes of a world."""

from __future__ import annotations

from pathlib import Path

from rollmesh.mesh.config.parallel import RouterSection
from rollmesh.testing.engine_cases import (
    critic_loss,
    make_batches,
    make_sequences,
    make_spec,
    policy_loss,
    train,
)
from rollmesh.testing.worlds import Harness

BALANCE, LOGITS = 0.5, 0.1
_ONE_MICRO_BATCH = 1 << 20


def beside_another(harness: Harness, model: Path) -> list[float]:
    """The losses of balance of a model alone, and of it and a critic whose micro-batches come between; collective."""
    section = RouterSection(load_balance_coeff=BALANCE)
    alone, first = (harness.make(make_spec(model, router=section)) for _ in range(2))
    second = harness.make(make_spec(model, router=section), "value_model")
    results = [train(alone, make_sequences(1))]
    for engine, loss in ((first, policy_loss), (second, critic_loss)):
        batches = make_batches(engine, make_sequences(1))
        engine.accumulate(batches, loss, engine.global_counts(batches))
    results += [first.apply(), second.apply()]
    return [result.metrics["load_balance_loss"] for result in results]


def in_parts(harness: Harness, model: Path) -> list[float]:
    """Norms of the gradient of a step in one call, and in two of half the micro-batches each; collective."""
    norms = []
    for parts in (1, 2):
        engine = harness.make(make_spec(model, router=RouterSection(z_loss_coeff=LOGITS)))
        batches = make_batches(engine, make_sequences(1, 6))
        counts = engine.global_counts(batches)
        for first in range(parts):
            engine.accumulate(batches[first::parts], policy_loss, counts)
        norms.append(engine.apply().metrics["grad_norm"])
    return norms


def probe(harness: Harness, model: Path) -> float | None:
    """The probe's difference of gradients where routers have losses; collective."""
    section = RouterSection(load_balance_coeff=BALANCE, z_loss_coeff=LOGITS)
    return harness.make(make_spec(model, router=section)).probe().truth.gradient
