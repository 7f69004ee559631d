"""Inference engines by name; their packages are imported when an engine is created, not before."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from rollmesh.generators.engines.interface import EngineListener, InferenceEngine
from rollmesh.generators.engines.types import EngineSettings
from rollmesh.mesh.errors import ConfigError

_FACTORIES = {
    "hf": "rollmesh.generators.engines.hf.engine:HfEngine",
    "sglang": "rollmesh.generators.engines.sglang.engine:SglangEngine",
    "vllm": "rollmesh.generators.engines.vllm.engine:VllmEngine",
}


def create_engine(name: str, folder: Path, settings: EngineSettings, listener: EngineListener) -> InferenceEngine:
    """Builds an engine; it is not started yet and has no weights.

    Args:
        name: registered name (`rollout.engine`).
        folder: configuration and tokenizer files of the model in Hugging Face form; no weights needed.
        settings: see there.
        listener: receives tokens, results and the failure.

    Raises:
        ConfigError: unknown engine, its package is not installed, or a setting it cannot serve.
        DataError: the folder does not hold a model that it can serve.
    """
    target = _FACTORIES.get(name)
    if target is None:
        raise ConfigError(f"unknown inference engine {name!r}", hint=f"known: {', '.join(sorted(_FACTORIES))}")
    module_name, _, class_name = target.partition(":")
    try:
        factory: type[InferenceEngine] = getattr(import_module(module_name), class_name)
    except ImportError as error:
        raise ConfigError(
            f"engine {name!r} needs a package that is missing here: {error}",
            hint=f"pip install 'rollmesh[{name}]', or name an interpreter that has it (rollout.python)",
        ) from error
    return factory.from_folder(folder, settings, listener)
