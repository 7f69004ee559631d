"""Engine `sglang`."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from rollmesh.generators.engines.external.backend import Backend
from rollmesh.generators.engines.external.engine import ExternalEngine
from rollmesh.generators.engines.external.model_info import ModelInfo
from rollmesh.generators.engines.sglang.backend import SglangBackend
from rollmesh.generators.engines.types import EngineSettings


class SglangEngine(ExternalEngine):
    """A server of SGLang in processes and an environment of its own, driven over HTTP.

    It differs from other engines in three ways. Draws are seeded for the server as a whole, not per request. `top_p` is
    taken of the whole distribution also where `top_k` cuts it (log-probs are of the distribution drawn from). A
    response may gain a few tokens after `pause`, which were sampled before it and carry that version.
    """

    name: ClassVar[str] = "sglang"
    takes_images: ClassVar[bool] = False
    takes_grammars: ClassVar[bool] = True

    @classmethod
    def create_backend(cls, folder: Path, model: ModelInfo, settings: EngineSettings) -> Backend:
        return SglangBackend(folder, model, settings)
