"""The parts of an engine's memory that can rest on the host, and which of them do so between calls."""

from __future__ import annotations

from rollmesh.learner.engines.interface import EngineSpec

PARAMS, OPTIMIZER, GRADIENTS = "params", "optimizer", "gradients"
PARTS = (PARAMS, OPTIMIZER, GRADIENTS)


def resting_parts(spec: EngineSpec) -> list[str]:
    """The parts that rest between calls by an engine's specification."""
    if spec.optimizer is None:
        return [PARAMS] if spec.offload else []
    memory = spec.memory
    return chosen_parts(
        params=memory.offload_params, optimizer=memory.offload_optimizer, gradients=memory.offload_gradients
    )


def chosen_parts(*, params: bool, optimizer: bool, gradients: bool) -> list[str]:
    """The names of the parts that are asked for."""
    chosen = {PARAMS: params, OPTIMIZER: optimizer, GRADIENTS: gradients}
    return [part for part, asked in chosen.items() if asked]
