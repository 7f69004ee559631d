"""The engine of each kind of model."""

from __future__ import annotations

from rollmesh.learner.engines.fsdp2.engine import Fsdp2Engine
from rollmesh.learner.engines.fsdp2.language_model import LanguageModelEngine
from rollmesh.learner.engines.fsdp2.value_model import ValueModelEngine
from rollmesh.learner.engines.interface import EngineSpec
from rollmesh.learner.engines.registry import ModelType


def create_engine(spec: EngineSpec, model_type: ModelType) -> Fsdp2Engine:
    """See `registry.create_engine`."""
    engines = {"language_model": LanguageModelEngine, "value_model": ValueModelEngine}
    return engines[model_type](spec)
