"""Engine `vllm`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import ClassVar

from rollmesh.generators.engines.external.backend import Backend
from rollmesh.generators.engines.external.engine import ExternalEngine
from rollmesh.generators.engines.external.model_info import ModelInfo
from rollmesh.generators.engines.types import EngineSettings
from rollmesh.generators.engines.vllm import environment, fork_server, logs
from rollmesh.generators.engines.vllm.engine_args import transfer_of

if importlib.util.find_spec("vllm") is None:
    # Its import takes seconds and reads the environment: it comes when an engine is created.
    raise ModuleNotFoundError("No module named 'vllm'", name="vllm")


class VllmEngine(ExternalEngine):
    """vLLM's AsyncLLM in this process; its engine core and workers are child processes."""

    name: ClassVar[str] = "vllm"
    takes_grammars: ClassVar[bool] = True

    @classmethod
    def create_backend(cls, folder: Path, model: ModelInfo, settings: EngineSettings) -> Backend:
        transfer_of(settings)
        environment.prepare(settings)
        if fork_server.serves(settings):
            logs.kept_log().install()
            fork_server.start()
        from rollmesh.generators.engines.vllm import private_names

        private_names.check_package()
        try:
            from rollmesh.generators.engines.vllm.backend import VllmBackend
        except ImportError as error:
            raise private_names.unsupported_version(str(error)) from error
        return VllmBackend(folder, model, settings)
