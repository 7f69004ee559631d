"""The engine of each kind of model."""

from __future__ import annotations

import logging

from rollmesh.learner.engines.interface import Engine, EngineSpec
from rollmesh.learner.engines.registry import ModelType


def create_engine(spec: EngineSpec, model_type: ModelType) -> Engine:
    """See `registry.create_engine`."""
    if spec.device == "cpu":
        from rollmesh.learner.engines.megatron.local.cpu import import_on_cpu

        # Before anything else imports Megatron-Core.
        import_on_cpu()
    # It describes each of its optimizers at length.
    logging.getLogger("megatron").setLevel(logging.WARNING)
    from rollmesh.learner.engines.megatron.engine import MegatronEngine

    return MegatronEngine(spec, value_model=model_type == "value_model")
