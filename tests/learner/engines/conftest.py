"""Shared work of the engine tests: a model, and one run on two gloo ranks whose results several tests look at."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from rollmesh.learner.checkpoint.store import CheckpointStore
from rollmesh.mesh.trajectory.versions import PolicyVersion
from tests.learner.engines.models import make_critic, make_engine, make_model
from tests.learner.engines.training import critic_loss, train_step
from tests.learner.ranks import run_two_ranks


@dataclass(frozen=True)
class TwoRankRun:
    model: Path
    # A model whose output layer is not its embedding.
    untied: Path
    # A model folder that holds a value head.
    critic: Path
    # Written by one rank, read by two.
    checkpoint: Path
    # Folder in which two ranks wrote a checkpoint, and the folder of the same weights that they exported.
    checkpoints: Path
    exported: Path
    # Folder of the models that two ranks loaded.
    models: Path
    tensors: dict[str, Any]
    figures: dict[str, Any]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    torch.set_num_threads(1)
    return make_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


@pytest.fixture(scope="session")
def two_rank_results(tmp_path_factory, worker_id: str) -> TwoRankRun:
    """Made by the test process that needs it first; the others wait for it."""
    base = tmp_path_factory.getbasetemp()
    out = (base if worker_id == "master" else base.parent) / "two_ranks"
    with FileLock(f"{out}.lock", timeout=110):
        if not (out / "checkpoint").exists():
            _run_on_two_ranks(out)
    return TwoRankRun(
        model=out / "qwen3",
        untied=out / "llama",
        critic=out / "critic",
        checkpoint=Path((out / "checkpoint").read_text()),
        checkpoints=out / "checkpoints",
        exported=out / "exported",
        models=out / "models",
        tensors=torch.load(out / "seen.pt", weights_only=True),
        figures=json.loads((out / "seen.json").read_text()),
    )


def _run_on_two_ranks(out: Path) -> None:
    torch.set_num_threads(1)
    model_folder = make_model(out / "qwen3", "qwen3")
    make_model(out / "llama", "llama")
    critic = make_critic(model_folder)
    train_step(critic, seed=8, loss=critic_loss)
    critic.export_hf(out / "critic")
    engine = make_engine(model_folder)
    train_step(engine, seed=9)
    checkpoint = CheckpointStore(out / "one_rank").save({"actor": engine}, PolicyVersion(2, 5), {"cursor": 11})
    for architecture in ("qwen3_moe", "olmo_hybrid", "gpt2"):
        make_model(out / "models" / architecture, architecture)
    run_two_ranks("tests.learner.engines.two_ranks", model_folder, checkpoint, out)
    (out / "checkpoint").write_text(str(checkpoint))
