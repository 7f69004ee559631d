"""The engine of each kind of model."""

from __future__ import annotations

from rollmesh.learner.engines.fsdp2.engine import Fsdp2Engine, MakeRunner
from rollmesh.learner.engines.fsdp2.language_model import LanguageModelRunner
from rollmesh.learner.engines.fsdp2.value_model import ValueModelRunner
from rollmesh.learner.engines.interface import EngineSpec
from rollmesh.learner.engines.registry import ModelType


def create_engine(spec: EngineSpec, model_type: ModelType) -> Fsdp2Engine:
    """See `registry.create_engine`."""
    runners: dict[ModelType, MakeRunner] = {"language_model": LanguageModelRunner, "value_model": ValueModelRunner}
    return Fsdp2Engine(spec, runners[model_type])
