"""Rollmesh: asynchronous reinforcement learning for language models as a mesh of small services.

`rollmesh.train(config, reward_fn=...)` runs a whole mesh from a script or notebook. Names are loaded when they are
first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollmesh.api import train
    from rollmesh.learner.callbacks import Callback
    from rollmesh.mesh.config import Config, load_config
    from rollmesh.mesh.errors import RollmeshError
    from rollmesh.report.summary import Summary
    from rollmesh.run_handle import Run

__all__ = ["Callback", "Config", "RollmeshError", "Run", "Summary", "load_config", "train"]

_HOMES = {
    "Callback": "rollmesh.learner.callbacks",
    "Config": "rollmesh.mesh.config",
    "RollmeshError": "rollmesh.mesh.errors",
    "Run": "rollmesh.run_handle",
    "Summary": "rollmesh.report.summary",
    "load_config": "rollmesh.mesh.config",
    "train": "rollmesh.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rollmesh' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
