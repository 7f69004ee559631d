"""A tiny model, a dataset, a configuration, and the services of a mesh."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import rollmesh.generators.service
import rollmesh.learner.service
from rollmesh.buffer.server.process import BufferFront
from rollmesh.mesh.access.code_permissions import AllowCode, CodeRule
from rollmesh.mesh.access.credentials import Identity, Role
from rollmesh.mesh.config import Config, load_config
from rollmesh.mesh.runtime.async_bridge import AsyncBridge
from rollmesh.mesh.runtime.service import Shutdown
from rollmesh.mesh.runtime.threads import thread_environment
from tests import fork_server

_LIFE_S = 240.0
# They end with the process.
_folders: list[TemporaryDirectory[str]] = []


def make_model(folder: Path, layers: int = 1) -> Path:
    """A seeded Qwen3 of 10 thousand parameters a layer with a character tokenizer."""
    vocabulary = {token: index for index, token in enumerate(["<eos>", "?", *"0123456789+="])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?", eos_token="<eos>", pad_token="<eos>")
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(vocabulary),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            eos_token_id=0,
            pad_token_id=0,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@cache
def _model(layers: int) -> Path:
    """The model, written once."""
    _folders.append(TemporaryDirectory(prefix="rollmesh-tiny-"))
    return make_model(Path(_folders[-1].name) / "model", layers)


def make_data(path: Path, rows: int) -> Path:
    """Prompts whose reward (`reward` below) a tiny model can raise quickly."""
    lines = [
        {
            "data_source": "digits",
            "prompt": f"{index % 10}+{index // 10 % 10}=",
            "reward_model": {"style": "rule", "ground_truth": str(index % 10)},
        }
        for index in range(rows)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return solution_str.count(ground_truth) / max(1, len(solution_str)) if solution_str else 0.0
"""


def make_config(folder: Path, overrides: Mapping[str, Any], layers: int = 1) -> Config:
    """A run that ends in seconds; `overrides` maps dotted keys to values."""
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    values: dict[str, Any] = {
        "run": {"name": "tiny", "dir": str(folder / "runs"), "seed": 1},
        "model": {"path": str(shutil.copytree(_model(layers), folder / "model", dirs_exist_ok=True))},
        "data": {"train": str(make_data(folder / "train.jsonl", 40)), "eval": str(make_data(folder / "eval.jsonl", 8))},
        "rollout": {"device": "cpu", "n": 4, "max_prompt_tokens": 8, "max_response_tokens": 6, "slots": 16},
        "reward": {"functions": [f"{folder / 'reward.py'}:compute_score"], "in_process": True},
        "learner": {"device": "cpu", "steps": 6, "batch": {"groups": 4}, "optimizer": {"lr": 1e-2}},
        "buffer": {"lease_s": 4.0, "reconnect_grace_s": 1.0},
        "eval": {"timeout_s": 20.0},
        "network": {"retry_s": 20.0, "metrics": False},
    }
    return load_config(values, [f"{key}={json.dumps(value)}" for key, value in overrides.items()])


@contextmanager
def learner_process(config: Config, mesh: str, folder: Path) -> Iterator[fork_server.RunningCommand]:
    """A learner as a process of its own, in the folder of its configuration; killed where it has not ended."""
    (folder / "config.json").write_text(config.model_dump_json(), encoding="utf-8")
    with (folder / "learner.log").open("w") as log:
        command = ["learner", str(folder / "config.json"), "--mesh", mesh]
        learner = fork_server.popen(command, env={**os.environ, **thread_environment(1)}, stdout=log, stderr=log)
    try:
        yield learner
    finally:
        learner.kill()
        learner.wait()


def run_learner(config: Config, mesh: str, **options: Any) -> int:
    """A learner in this process; gives its exit code."""
    root = logging.getLogger()
    before = root.handlers[:]
    try:
        return rollmesh.learner.service.run(config, mesh, **options)
    finally:
        root.handlers[:] = before


@contextmanager
def meanwhile(action: Callable[[], None]) -> Iterator[None]:
    """Runs an action in a thread concurrently with the block; its failure is the block's."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(action)
        yield
        future.result(_LIFE_S)


class Mesh:
    """Buffer with its Redis, and a generator, in a thread of this process.

    (A process of its own for each would spend most of a test on imports.)
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._bridge = AsyncBridge("mesh")
        self._service = self._bridge.call(self._start(0), _LIFE_S)
        self._shutdown = self._bridge.call(self._make_shutdown(), _LIFE_S)
        self.address = self._service.address
        self._generator = self._bridge.submit(
            rollmesh.generators.service.serve(
                self.address,
                self._shutdown,
                rollmesh.generators.service.GeneratorOptions(
                    identity=Identity(Role.GENERATOR, "generator"),
                    security=config.security,
                    code=CodeRule(AllowCode.ANY),
                    threads=1,
                ),
            )
        )

    async def _start(self, port: int) -> BufferFront:
        service = BufferFront(self._config, host=self._config.network.host, port=port)
        await service.start()
        return service

    async def _make_shutdown(self) -> Shutdown:
        return Shutdown()

    def stop_buffer(self) -> None:
        """Ends front and Redis."""
        self._bridge.call(self._service.stop(), _LIFE_S)

    def start_buffer(self) -> None:
        """Starts them again on the same port with the same data."""
        self._service = self._bridge.call(self._start(int(self.address.rpartition(":")[2])), _LIFE_S)

    def close(self) -> None:
        self._bridge.loop.call_soon_threadsafe(self._shutdown.request, "the test is over")
        try:
            self._generator.result(_LIFE_S)
        finally:
            self._bridge.call(self._service.stop(), _LIFE_S)
            self._bridge.close()


@contextmanager
def open_mesh(config: Config) -> Iterator[Mesh]:
    """A mesh for as long as the block runs."""
    mesh = Mesh(config)
    try:
        yield mesh
    finally:
        mesh.close()


@contextmanager
def mesh_of(config: Config) -> Iterator[str]:
    """The same; gives the mesh's address."""
    with open_mesh(config) as mesh:
        yield mesh.address
