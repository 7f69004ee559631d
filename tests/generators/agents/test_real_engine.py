"""Episodes on the real `hf` engine and an `ExternalEngine`.

The stored log-probs are those that the model computed, across swaps; pinned episodes see none.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollmesh.generators.agents import build_runner
from rollmesh.generators.agents.runner import AgentRunner
from rollmesh.generators.engine_events import EngineEventBridge
from rollmesh.generators.engines import create_engine
from rollmesh.generators.engines.external.model_info import ModelInfo
from rollmesh.generators.engines.interface import InferenceEngine
from rollmesh.generators.engines.types import EngineSettings, SamplingParams
from rollmesh.generators.rollout.awake_clock import AwakeClock
from rollmesh.generators.rollout.response_source import EpisodeResult, MemberRequest
from rollmesh.generators.tokenizer import TokenizerCodec
from rollmesh.mesh.trajectory.versions import PolicyVersion
from tests.generators.agents.scene import HERE, TOKENIZER, runs_of, settings, task_of
from tests.generators.engines.external.driven_harness import LIMITS, ScriptedEngine
from tests.generators.engines.external.scripted import ScriptedBackend, TableModel
from tests.generators.engines.tiny import VOCABULARY, ContractModel

V0, V1 = PolicyVersion(1, 0), PolicyVersion(1, 1)
DEADLINE_S = 240.0


class Real:
    """A runner over a real engine."""

    def __init__(self, kind: str, folder: Path, **agent: Any) -> None:
        model = ContractModel(folder)
        TOKENIZER.save_pretrained(model.folder)
        self.model: ContractModel | TableModel = model
        self.results: asyncio.Queue[EpisodeResult] = asyncio.Queue()
        feed = EngineEventBridge(lambda error: None)
        settings_of = EngineSettings(slots=8)
        self.engine: InferenceEngine
        if kind == "hf":
            self.engine = create_engine("hf", model.folder, settings_of, feed)
        else:
            self.model = TableModel(VOCABULARY)
            backend = ScriptedBackend(self.model, LIMITS, TOKENIZER, settings_of.slots)
            self.engine = ScriptedEngine(backend, ModelInfo(LIMITS, TOKENIZER), settings_of, feed)
        self.engine.start()
        self.weights = {V0: self.model.random_weights(0), V1: self.model.random_weights(1)}
        self.config = settings(max_turns=3, turn_tokens=6, **agent)
        self.runner: AgentRunner = build_runner(self.config, self.engine, TokenizerCodec(model.folder), AwakeClock())
        self.runner.connect(self._take)
        feed.connect(lambda batch: self.runner.accept_results(batch))

    def _take(self, ended: Any) -> None:
        for result in ended:
            self.results.put_nowait(result)

    async def serve(self, version: PolicyVersion) -> None:
        swap = self.engine.update_weights(version, self.weights[version].items(), str(version))
        await asyncio.wait_for(asyncio.wrap_future(swap), DEADLINE_S)

    def requests(self, count: int, **fields: Any) -> list[MemberRequest]:
        task = task_of(self.config, [{"role": "user", "content": "Play"}])
        prompt = np.frombuffer(task.prompt_ids, "<i4").tolist()
        sampling = SamplingParams(max_tokens=120)
        return [
            MemberRequest(
                **{
                    "request_id": str(index),
                    "prompt_ids": prompt,
                    "sampling": sampling,
                    "task": task,
                    "member": index,
                    **fields,
                }
            )
            for index in range(count)
        ]

    async def take(self, count: int) -> list[EpisodeResult]:
        async with asyncio.timeout(DEADLINE_S):
            return [await self.results.get() for _ in range(count)]


@pytest.fixture(params=["hf", "driven"])
async def real(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Real]:
    torch.set_num_threads(1)
    stage = Real(request.param, tmp_path, environment=f"{HERE}:Gym")
    await stage.serve(V0)
    yield stage
    await stage.runner.close()
    await asyncio.to_thread(stage.engine.stop)


async def test_log_probs_are_those_of_the_whole_sequence(real: Real) -> None:
    requests = real.requests(6)
    real.runner.submit(requests)
    for result in await real.take(6):
        assert result.failure == ""
        assert sum(sampled for sampled, _ in runs_of(result.sampled)) >= 2, "several turns"
        prompt, response = list(requests[0].prompt_ids), result.sampled.response_ids.tolist()
        logits = real.model.logits(real.weights[V0], prompt + response)[len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits, -1)[range(len(response)), response].numpy()
        mask = result.sampled.response_mask
        assert mask is not None
        np.testing.assert_allclose(result.sampled.log_probs[mask == 1], expected[mask == 1], atol=1e-4)
        assert not result.sampled.log_probs[mask == 0].any()


async def test_weights_change_between_turns_and_tokens_say_so(real: Real) -> None:
    real.runner.submit(real.requests(8))
    await real.serve(V1)
    results = await real.take(8)
    seen = {version for result in results for version in result.sampled.versions.versions}
    assert V1 in seen
    for result in results:
        assert len(result.sampled.versions) == len(result.sampled.response_ids)
        versions = list(result.sampled.versions)
        assert versions == sorted(versions)
        prompt, response = list(real.requests(1)[0].prompt_ids), result.sampled.response_ids.tolist()
        if set(versions) == {V1}:
            logits = real.model.logits(real.weights[V1], prompt + response)[len(prompt) - 1 : -1]
            expected = torch.log_softmax(logits, -1)[range(len(response)), response].numpy()
            np.testing.assert_allclose(
                result.sampled.log_probs[result.sampled.response_mask == 1],
                expected[result.sampled.response_mask == 1],
                atol=1e-4,
            )


async def test_a_draft_of_a_running_episode_is_its_beginning(real: Real) -> None:
    real.runner.submit(real.requests(4))
    parts: list[Any] = []
    async with asyncio.timeout(DEADLINE_S):
        while not parts and real.results.empty():
            parts = await asyncio.wrap_future(real.runner.progress({str(index): 1 for index in range(4)}))
    results = {result.request_id: result for result in await real.take(4)}
    assert parts or results
    for part in parts:
        count, whole = len(part.sampled), results[part.request_id]
        assert whole.sampled.response_ids[:count].tolist() == part.sampled.response_ids.tolist()
        assert whole.sampled.response_mask[:count].tolist() == part.sampled.response_mask.tolist()
        assert whole.sampled.log_probs[:count].tolist() == part.sampled.log_probs.tolist()
