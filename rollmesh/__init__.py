"""Rollmesh: asynchronous reinforcement learning for language models as a mesh of small services.

`rollmesh.train(config, reward_fn=...)` runs a whole mesh from a script or notebook. `rollmesh.sft(config)`,
`rollmesh.rm(config)` and `rollmesh.dpo(config)` train on data that are there. `rollmesh.evaluate(config, model)`
measures a model with the generators and rewards of a run. Names are loaded when they are first used, so that importing
the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollmesh.api import evaluate, train
    from rollmesh.evaluation.summary import EvaluationSummary
    from rollmesh.learner.callbacks import Callback
    from rollmesh.mesh.config import Config, load_config
    from rollmesh.mesh.errors import RollmeshError
    from rollmesh.report.summary import Summary
    from rollmesh.run_handle import Run
    from rollmesh.trainers import dpo, rm, sft

__all__ = [
    "Callback",
    "Config",
    "EvaluationSummary",
    "RollmeshError",
    "Run",
    "Summary",
    "dpo",
    "evaluate",
    "load_config",
    "rm",
    "sft",
    "train",
]
_HOMES = {
    "Callback": "rollmesh.learner.callbacks",
    "Config": "rollmesh.mesh.config",
    "EvaluationSummary": "rollmesh.evaluation.summary",
    "RollmeshError": "rollmesh.mesh.errors",
    "Run": "rollmesh.run_handle",
    "Summary": "rollmesh.report.summary",
    "dpo": "rollmesh.trainers",
    "evaluate": "rollmesh.api",
    "load_config": "rollmesh.mesh.config",
    "rm": "rollmesh.trainers",
    "sft": "rollmesh.trainers",
    "train": "rollmesh.api",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("rollmesh")
    if name not in _HOMES:
        raise AttributeError(f"module 'rollmesh' has no attribute {name!r}")

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The names that are loaded at first use too, for completion in notebooks."""
    return sorted({*globals(), *__all__, "__version__"})
