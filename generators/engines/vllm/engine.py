"""Engine `vllm`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import ClassVar

from rollmesh.generators.engines.base import EngineSettings
from rollmesh.generators.engines.driven.backend import Backend
from rollmesh.generators.engines.driven.engine import DrivenEngine
from rollmesh.generators.engines.driven.folder import ModelFacts
from rollmesh.generators.engines.vllm import environment
from rollmesh.generators.engines.vllm.arguments import transfer_of

if importlib.util.find_spec("vllm") is None:
    # Its import takes seconds and reads the environment: it comes when an engine is created.
    raise ModuleNotFoundError("No module named 'vllm'", name="vllm")


class VllmEngine(DrivenEngine):
    """vLLM's AsyncLLM in this process; its engine core and workers are child processes."""

    name: ClassVar[str] = "vllm"

    @classmethod
    def create_backend(cls, folder: Path, model: ModelFacts, settings: EngineSettings) -> Backend:
        transfer_of(settings)
        environment.prepare(settings)
        from rollmesh.generators.engines.vllm import names

        names.check_package()
        try:
            from rollmesh.generators.engines.vllm.backend import VllmBackend
        except ImportError as error:
            raise names.unfit(str(error)) from error
        return VllmBackend(folder, model, settings)
