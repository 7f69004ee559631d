"""The `hf` engine under the contract."""

from __future__ import annotations

from generators.engines import create_engine
from generators.engines.base import EngineListener, EngineSettings, InferenceEngine, KvPolicy
from tests.generators.engines.harness import ModelHarness
from tests.generators.engines.tiny import ContractModel


class HfHarness(ModelHarness):
    """A new engine, model and all, per test."""

    tolerance = 1e-4

    def __init__(self, model: ContractModel, kv: KvPolicy, device: str = "cpu") -> None:
        self._settings = EngineSettings(slots=self.slots, kv=kv, device=device)
        super().__init__(model)

    def build(self, listener: EngineListener) -> InferenceEngine:
        return create_engine("hf", self.model.folder, self._settings, listener)
