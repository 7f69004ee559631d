"""`ExternalEngine` over the scripted backend, as the contract's tests want it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from rollmesh.generators.engines.errors import RequestError
from rollmesh.generators.engines.external.backend import Backend, DecodeJob
from rollmesh.generators.engines.external.engine import ExternalEngine
from rollmesh.generators.engines.external.model_info import ModelInfo
from rollmesh.generators.engines.external.restarting_backend import RestartingBackend
from rollmesh.generators.engines.interface import EngineListener
from rollmesh.generators.engines.request_validation import RequestLimits
from rollmesh.generators.engines.types import EngineSettings, KvPolicy
from tests.generators.engines import tiny
from tests.generators.engines.external.scripted import ScriptedBackend, TableModel
from tests.generators.engines.harness import EngineHarness, Weights

LIMITS = RequestLimits(tiny.CONTEXT, tiny.VOCABULARY, frozenset({tiny.EOS}))


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """One for all tests."""
    return tiny.train_tokenizer()


class ScriptedEngine(ExternalEngine):
    """Made by tests, from no folder."""

    name = "scripted"

    @classmethod
    def create_backend(cls, folder: Path, model: ModelInfo, settings: EngineSettings) -> Backend:
        raise NotImplementedError


class ScriptedHarness(EngineHarness):
    """See `EngineHarness`; `backend` is at the tests' mercy."""

    def __init__(self, kv: KvPolicy = "keep", stride: int = 1) -> None:
        self.kv: KvPolicy = kv
        self.table = TableModel(self.vocabulary)
        self.backend = ScriptedBackend(self.table, LIMITS, tokenizer(), self.slots, stride)
        super().__init__()

    def build(self, listener: EngineListener) -> ScriptedEngine:
        settings = EngineSettings(slots=self.slots, kv=self.kv)
        return ScriptedEngine(self.backend, ModelInfo(LIMITS, tokenizer()), settings, listener)

    def unfinished(self) -> int:
        """Sets of weights that were staged, and neither loaded nor discarded."""
        return self.backend.staged

    def random_weights(self, seed: int) -> Weights:
        return self.table.random_weights(seed)

    def constant_weights(self, token: int) -> Weights:
        return self.table.constant_weights(token)

    def uniform_weights(self) -> Weights:
        weights = self.table.constant_weights(self.eos)
        return {**weights, TableModel.table: -weights[TableModel.table]}

    def logits(self, weights: Weights, ids: list[int]) -> torch.Tensor:
        return self.table.logits(weights, ids)

    def fail_at(self, token: int) -> None:
        def check(job: DecodeJob) -> None:
            if token in job.token_ids:
                raise RequestError("illegal instruction")

        self.backend.at_job = check

    def text(self, ids: Sequence[int]) -> str:
        text = tokenizer().decode(list(ids))
        assert isinstance(text, str)
        return text


class RestartingHarness(ScriptedHarness):
    """The same, where the backend ends while it sleeps.

    Attributes:
        ended: backends before the present one.
    """

    # It has no processes.
    sleep_frees = False

    def __init__(self, kv: KvPolicy = "keep", stride: int = 1, restart_timeout_s: float = 60.0) -> None:
        self._stride, self._restart_timeout_s = stride, restart_timeout_s
        self.ended: list[ScriptedBackend] = []
        super().__init__(kv, stride)

    def build(self, listener: EngineListener) -> ScriptedEngine:
        settings = EngineSettings(slots=self.slots, kv=self.kv)
        backend = RestartingBackend(self._create, self._restart_timeout_s)
        return ScriptedEngine(backend, ModelInfo(LIMITS, tokenizer()), settings, listener)

    def unfinished(self) -> int:
        return sum(backend.staged for backend in (*self.ended, self.backend))

    def _create(self) -> ScriptedBackend:
        if "start" in self.backend.calls:
            self.ended.append(self.backend)
            self.backend = ScriptedBackend(self.table, LIMITS, tokenizer(), self.slots, self._stride)
        return self.backend
