"""A critic in half precision, for the processes of a world: its head is float32, so a group has two dtypes."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from rollmesh.testing.contract_state import save
from rollmesh.testing.engine_cases import critic_loss, make_sequences, make_spec, train, weights
from rollmesh.testing.worlds import Harness


def resume(harness: Harness, model: Path, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights of a critic that trains on, and of one that is resumed; collective."""
    first, second = (harness.make(make_spec(model, param_dtype="bfloat16"), "value_model") for _ in range(2))
    train(first, make_sequences(1), critic_loss)
    save(first, folder)
    second.load_checkpoint(folder)
    for engine in (first, second):
        train(engine, make_sequences(2), critic_loss)
    return weights(first), weights(second)
