"""vLLM over several workers, with models of other architectures than the contract's; one engine per case."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import psutil
import pytest
import torch
from transformers import PreTrainedConfig, Qwen2Config, Qwen3MoeConfig

from rollmesh.generators.engine_watch import FrozenEngineError, watch
from rollmesh.generators.engines import create_engine
from rollmesh.generators.engines.interface import EngineListener, InferenceEngine
from rollmesh.generators.engines.types import EngineSettings
from rollmesh.mesh.config.rollout import VllmSection
from tests.generators.engines import tiny
from tests.generators.engines.harness import PROMPT, V1, V2, EngineHarness, Weights, request
from tests.generators.engines.vllm.step_gate import StepGate
from tests.sockets import assert_on_loopback, listeners

pytestmark = [pytest.mark.engine("vllm")]

# No token ends a sequence: all of them are as long as they may be.
_BLOCKS = {**tiny.BLOCKS, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "eos_token_id": None}


@dataclass(frozen=True)
class Case:
    """A model, how vLLM divides it, the processes that it takes, and which of them the test stops at the end."""

    config: PreTrainedConfig
    section: dict[str, Any]
    processes: int
    stopped: Literal["worker", "core"]


CASES = {
    # Each worker has half of every expert, 48 rows, which vLLM widens to 64.
    "experts over two workers": Case(
        Qwen3MoeConfig(**_BLOCKS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=96),
        {"tensor_parallel": 2},
        processes=3,
        stopped="worker",
    ),
    "tied head, two copies": Case(
        Qwen2Config(**_BLOCKS, tie_word_embeddings=True), {"data_parallel": 2}, processes=3, stopped="core"
    ),
}


class Served(EngineHarness):
    """vLLM with one of these models."""

    slots: ClassVar[int] = 4
    long: ClassVar[int] = 40
    deadline_s: ClassVar[float] = 600.0

    def __init__(self, folder: Path, case: Case) -> None:
        torch.set_num_threads(1)
        self.folder, self.case = folder, case
        self.model = tiny.build_model(case.config)
        tiny.save_folder(folder, self.model, None)
        super().__init__()

    def build(self, listener: EngineListener) -> InferenceEngine:
        section = VllmSection(kv_cache_gib=0.125, **self.case.section)
        return create_engine("vllm", self.folder, EngineSettings(slots=self.slots, threads=2, vllm=section), listener)

    @contextmanager
    def slowly(self, tokens: int) -> Iterator[None]:
        with StepGate().at_most(tokens):
            yield

    def random_weights(self, seed: int) -> Weights:
        return dict(tiny.build_model(self.case.config, seed).state_dict())

    def constant_weights(self, token: int) -> Weights:
        raise NotImplementedError

    def uniform_weights(self) -> Weights:
        raise NotImplementedError

    def fail_at(self, token: int) -> None:
        raise NotImplementedError

    def text(self, ids: Sequence[int]) -> str:
        raise NotImplementedError

    def logits(self, weights: Weights, ids: list[int]) -> torch.Tensor:
        self.model.load_state_dict(weights)
        with torch.no_grad():
            logits: torch.Tensor = self.model(torch.tensor([ids]), use_cache=False).logits[0]
        return logits.float()


def engine_processes() -> set[psutil.Process]:
    """Children of this process, theirs, and so on, without Python's own.

    One of these looks after shared memory, another forks engine cores.
    """
    children = psutil.Process().children(recursive=True)
    zombies = {child for child in children if child.status() == psutil.STATUS_ZOMBIE}
    return {child for child in children if child in zombies or not _of_python(child)}


def _of_python(process: psutil.Process) -> bool:
    command = " ".join(process.cmdline())
    return "resource_tracker" in command or (process.ppid() == os.getpid() and "forkserver" in command)


def one_of(processes: set[psutil.Process], kind: Literal["worker", "core"]) -> psutil.Process:
    """The first of a kind, by the name that vLLM gives it."""
    title = {"worker": "Worker", "core": "EngineCore"}[kind]
    return next(process for process in processes if title in " ".join(process.cmdline()))


def shared_memory(processes: set[psutil.Process]) -> set[Path]:
    """Files in memory that they have mapped."""
    paths = {area.path for process in processes for area in process.memory_maps()}
    return {Path(path) for path in paths if path.startswith("/dev/shm/")}  # where the kernel has it


@pytest.mark.parametrize("name", CASES)
def test_weights_reach_every_worker_amid_responses_and_nothing_is_left(name: str, tmp_path: Path) -> None:
    """Also where one of its processes is stopped for good: it is found, and none is left."""
    others = engine_processes()
    served = Served(tmp_path, CASES[name])
    try:
        old, new = served.random_weights(1), served.random_weights(2)
        served.update(V1, old)
        for result in served.run([request(f"old {index}", [3 + index, 4, 5], max_tokens=8) for index in range(5)]):
            assert result.sampled.versions.versions == (V1,)
            served.check_log_probs(result, old, [3 + int(result.request_id.split()[1]), 4, 5])
        running = [request(f"across {index}", max_tokens=served.long, seed=1 + index) for index in range(4)]
        before = served.freeze(running)
        served.update(V2, new)
        served.resume()
        results = served.collector.wait([item.request_id for item in running])
        assert results[0].sampled.versions.versions == (V1, V2)
        for result in results:
            count = list(result.sampled.versions).count(V1)
            assert len(result.sampled.response_ids) == served.long
            if result.request_id in before:
                assert count >= len(before[result.request_id].sampled)
            if count:
                sampled = served.log_probs(old, [*PROMPT, *result.sampled.response_ids.tolist()[:count]])[-count:]
                np.testing.assert_allclose(result.sampled.log_probs[:count], sampled, atol=served.tolerance)
            else:
                served.check_log_probs(result, new, PROMPT)
        for result in served.run([request(f"new {index}", max_tokens=8, seed=1 + index) for index in range(5)]):
            assert result.sampled.versions.versions == (V2,)
            served.check_log_probs(result, new, PROMPT)
        probed = served.engine.probe(PROMPT).result(served.deadline_s).log_probs
        np.testing.assert_allclose(probed, served.log_probs(new, PROMPT), atol=served.tolerance)
        processes = engine_processes() - others
        assert len(processes) == CASES[name].processes
        assert_on_loopback(listeners(os.getpid()))
        shared = shared_memory(processes)
        asked = [request(f"cut {index}", max_tokens=served.long, stream=True) for index in range(4)]
        with served.slowly(1):
            served.engine.submit(asked)
            served.collector.wait_streamed({"cut 0": 1})
            one_of(processes, CASES[name].stopped).suspend()
        with pytest.raises(FrozenEngineError, match="stopped by a signal"):
            asyncio.run(asyncio.wait_for(watch(served.engine, 1.0), served.deadline_s))
    finally:
        served.close()
    assert engine_processes() <= others
    assert not any(path.exists() for path in shared)
