"""The `hf` engine under the contract."""

from __future__ import annotations

from typing import Any

from rollmesh.generators.engines import create_engine
from rollmesh.generators.engines.interface import EngineListener, InferenceEngine
from rollmesh.generators.engines.types import EngineSettings, KvPolicy
from rollmesh.mesh.config.rollout import HfSection
from tests.generators.engines.harness import ModelHarness
from tests.generators.engines.tiny import ContractModel


class HfHarness(ModelHarness):
    """A new engine, model and all, per test."""

    tolerance = 1e-4

    def __init__(
        self, model: ContractModel, kv: KvPolicy, device: str = "cpu", kv_gib: float | None = None, sharing: int = 1
    ) -> None:
        hf = HfSection(kv_cache_gib=kv_gib)
        self._settings = EngineSettings(slots=self.slots, kv=kv, device=device, sharing=sharing, hf=hf)
        super().__init__(model)

    def fail_at(self, token: int) -> None:
        model = self.engine._decoder._model  # type: ignore[attr-defined]  # what runs the tokens
        forward = model.forward

        def broken(*arguments: Any, **named: Any) -> Any:
            if (named["input_ids"] == token).any():
                raise RuntimeError("illegal instruction")
            return forward(*arguments, **named)

        model.forward = broken

    def build(self, listener: EngineListener) -> InferenceEngine:
        return create_engine("hf", self.model.folder, self._settings, listener)
