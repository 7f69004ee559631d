"""Registry of engines by (model type, backend, device).

Engines are named by import path, so that a backend's packages load only when it is chosen.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Literal

from rollmesh.learner.engines.interface import Engine, EngineSpec
from rollmesh.mesh.errors import ConfigError

ModelType = Literal["language_model", "value_model"]

_ENGINES: dict[tuple[str, str, str], str] = {
    ("language_model", "fsdp2", "cpu"): "rollmesh.learner.engines.fsdp2.language_model:LanguageModelEngine",
    ("language_model", "fsdp2", "cuda"): "rollmesh.learner.engines.fsdp2.language_model:LanguageModelEngine",
    ("value_model", "fsdp2", "cpu"): "rollmesh.learner.engines.fsdp2.value_model:ValueModelEngine",
    ("value_model", "fsdp2", "cuda"): "rollmesh.learner.engines.fsdp2.value_model:ValueModelEngine",
}


def create_engine(spec: EngineSpec, *, model_type: ModelType = "language_model", backend: str = "fsdp2") -> Engine:
    """Builds the engine of this process; collective over the ranks.

    Args:
        spec: model, optimizer, device.
        model_type: a language model, or a value model: the same backbone with a scalar head.
        backend: training backend.

    Raises:
        ConfigError: nothing is registered for the combination.
        DataError: the model cannot be loaded.
    """
    location = _ENGINES.get((model_type, backend, spec.device))
    if location is None:
        known = ", ".join("/".join(key) for key in sorted(_ENGINES))
        raise ConfigError(f"no engine for {model_type}/{backend}/{spec.device}", hint=f"known: {known}")
    module, _, name = location.partition(":")
    build: Callable[[EngineSpec], Engine] = getattr(importlib.import_module(module), name)
    return build(spec)
