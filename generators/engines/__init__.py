"""Inference engines by name; their packages are imported when an engine is created, not before."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from generators.engines.base import InferenceEngine, KvPolicy, OnFailure, OnResults
from mesh.errors import ConfigError

_FACTORIES = {"hf": "generators.engines.hf.engine:HfEngine"}


def create_engine(
    name: str,
    folder: Path,
    *,
    slots: int,
    dtype: str,
    on_results: OnResults,
    on_failure: OnFailure,
    kv: KvPolicy = "keep",
    device: str = "cpu",
    seed: int = 0,
) -> InferenceEngine:
    """Builds an engine; it is not started yet and has no weights.

    Args:
        name: registered name (`rollout.engine`).
        folder: configuration and tokenizer files of the model in Hugging Face form; no weights needed.
        slots: sequences decoded together.
        dtype: float32, bfloat16 or float16.
        on_results: receives finished responses, in batches, in the engine's thread.
        on_failure: told once when the engine has failed as a whole; nothing follows it.
        kv: what becomes of running sequences' KV cache at a swap.
        device: torch device.
        seed: of the draws of requests that bring none.

    Raises:
        ConfigError: unknown engine, or its package is not installed.
        DataError: the folder does not hold a causal language model.
    """
    target = _FACTORIES.get(name)
    if target is None:
        raise ConfigError(f"unknown inference engine {name!r}", hint=f"known: {', '.join(sorted(_FACTORIES))}")
    module_name, _, class_name = target.partition(":")
    try:
        factory: type[InferenceEngine] = getattr(import_module(module_name), class_name)
    except ImportError as error:
        raise ConfigError(
            f"engine {name!r} needs a package that is missing: {error}", hint=f"pip install 'rollmesh[{name}]'"
        ) from error
    return factory.from_folder(
        folder,
        slots=slots,
        dtype=dtype,
        on_results=on_results,
        on_failure=on_failure,
        kv=kv,
        device=device,
        seed=seed,
    )
