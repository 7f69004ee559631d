"""Rollmesh: asynchronous reinforcement learning for language models as a mesh of small services.

`rollmesh.train(config, reward_fn=...)` runs a whole mesh from a script or notebook, and `rollmesh.evaluate(config,
model)` measures a model with the same generators and rewards. Names are loaded when they are first used, so that
importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollmesh.api import evaluate, train
    from rollmesh.evaluation.summary import EvaluationSummary
    from rollmesh.mesh.config import Config, load_config
    from rollmesh.mesh.errors import RollmeshError
    from rollmesh.report.summary import Summary

__all__ = ["Config", "EvaluationSummary", "RollmeshError", "Summary", "evaluate", "load_config", "train"]

_HOMES = {
    "Config": "rollmesh.mesh.config",
    "EvaluationSummary": "rollmesh.evaluation.summary",
    "RollmeshError": "rollmesh.mesh.errors",
    "Summary": "rollmesh.report.summary",
    "evaluate": "rollmesh.api",
    "load_config": "rollmesh.mesh.config",
    "train": "rollmesh.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rollmesh' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
