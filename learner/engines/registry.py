"""Registry of engines by backend: those of this package, and those that other packages bring.

A package brings one by an entry point of the group `rollmesh.engines`. Its name is that of the backend, its object a
function of a specification and a kind of model. Engines are named by import path, so that a backend's packages load
only when it is chosen.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Literal

from rollmesh.learner.engines.interface import Engine, EngineSpec
from rollmesh.mesh.errors import ConfigError

ModelType = Literal["language_model", "value_model"]
CreateEngine = Callable[[EngineSpec, ModelType], Engine]

GROUP = "rollmesh.engines"
"""Entry points of other packages' engines."""
_ENGINES = {
    "fsdp2": "rollmesh.learner.engines.fsdp2.create:create_engine",
    "megatron": "rollmesh.learner.engines.megatron.create:create_engine",
}


def create_engine(spec: EngineSpec, *, model_type: ModelType = "language_model", backend: str = "fsdp2") -> Engine:
    """Builds the engine of this process; collective.

    Args:
        spec: model, optimizer, device.
        model_type: a language model, or a value model: the same backbone with a scalar head.
        backend: training backend.

    Raises:
        ConfigError: no such backend, or none for that kind of model and device.
        DataError: the model cannot be loaded.
    """
    check_backend(backend)
    if backend in _ENGINES:
        module, _, name = _ENGINES[backend].partition(":")
        create: CreateEngine = getattr(importlib.import_module(module), name)
    else:
        create = _brought()[backend].load()
    return create(spec, model_type)


def check_backend(backend: str, key: str = "learner.engine") -> None:
    """Checks that there is such an engine, with what it needs; loads none.

    Args:
        backend: training backend.
        key: of the configuration that names it.

    Raises:
        ConfigError: there is none, or its package is not installed here.
    """
    # To list what other packages bring, all of their metadata are read.
    if backend not in _ENGINES and backend not in (brought := _brought()):
        known = ", ".join(sorted({*_ENGINES, *brought}))
        raise ConfigError(f"{key}: no engine {backend!r}", hint=f"known: {known}")
    # Other packages share the namespace, and without any of them there is none.
    if backend == "megatron" and not all(map(find_spec, ("megatron", "megatron.core"))):
        raise ConfigError(
            f"{key}: megatron needs the package megatron-core, which is not installed beside {sys.executable}",
            hint='pip install "rollmesh[megatron]" there, or set learner.python to an interpreter that has it',
        )


def _brought() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}
