"""The `hf` engine under the contract of all engines, with each KV policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from generators.engines import create_engine
from generators.engines.base import KvPolicy
from tests.generators.engines import tiny
from tests.generators.engines.contract import EngineContract
from tests.generators.engines.harness import Collector, EngineHarness


class HfHarness(EngineHarness):
    slots = 5
    vocabulary = tiny.VOCABULARY
    eos = tiny.EOS
    context = tiny.CONTEXT

    def __init__(self, folder: Path, kv: KvPolicy, device: str = "cpu") -> None:
        torch.set_num_threads(1)
        config = tiny.configs()["qwen3"]
        assert isinstance(config, Qwen3Config)
        config.tie_word_embeddings = False
        config.eos_token_id = tiny.EOS
        self._model = tiny.build_model(config)
        self._tokenizer = tiny.train_tokenizer()
        tiny.save_folder(folder, self._model, self._tokenizer)
        self.collector = Collector()
        self.engine = create_engine(
            "hf",
            folder,
            slots=self.slots,
            dtype="float32",
            on_results=self.collector.on_results,
            on_failure=self.collector.on_failure,
            kv=kv,
            device=device,
        )
        self.engine.start()

    def text(self, ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(ids)
        assert isinstance(text, str)
        return text

    def random_weights(self, seed: int) -> dict[str, torch.Tensor]:
        state = tiny.build_model(self._model.config, seed).state_dict()
        return {name: tensor.clone() for name, tensor in state.items()}

    def constant_weights(self, token: int) -> dict[str, torch.Tensor]:
        weights = {name: torch.ones_like(tensor) for name, tensor in self._model.state_dict().items()}
        for name, tensor in weights.items():
            # Without the blocks' outputs the last hidden state is all ones, and the head alone decides.
            if "o_proj" in name or "down_proj" in name or "lm_head" in name:
                tensor.zero_()
        weights["lm_head.weight"][token] = 1.0
        return weights

    def log_probs(self, weights: dict[str, torch.Tensor], ids: list[int]) -> torch.Tensor:
        self._model.load_state_dict(weights)
        with torch.no_grad():
            logits = self._model(torch.tensor([ids])).logits[0, :-1]
        return torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


class TestHfEngine(EngineContract):
    @pytest.fixture(params=["keep", "recompute", "interrupt"])
    def harness(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EngineHarness]:
        harness = HfHarness(tmp_path, request.param)
        yield harness
        harness.engine.stop()


@pytest.mark.gpu
class TestHfEngineOnCuda(EngineContract):
    @pytest.fixture(params=["keep", "recompute", "interrupt"])
    def harness(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EngineHarness]:
        harness = HfHarness(tmp_path, request.param, device="cuda")
        yield harness
        harness.engine.stop()
